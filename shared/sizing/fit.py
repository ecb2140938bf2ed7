"""Whether and on how many GPUs a model serves a load: both pools, the collocated alternative, the cost."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from math import gcd

from shared.errors import ConfigError
from shared.sizing.load import Hardware, Load, PoolFit
from shared.sizing.memory import gpus_by_memory
from shared.sizing.pools import collocated_pool, decode_pool, prefill_pool
from shared.sizing.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a million tokens at full load, in the currency of the prices."""

    per_hour: float
    per_million_prompt_tokens: float
    """The prefill pool's hours over the prompts' tokens; 0 where one pool does both."""
    per_million_output_tokens: float
    """The decode pool's hours over the answers' tokens."""
    per_million_tokens: float
    """Both pools' hours over the tokens of prompts and answers."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer of `tandem fit`."""

    model: ModelShape
    load: Load
    hardware: Hardware
    floor_mha: int
    """GPUs of the decode kind by memory alone, with K and V for every attention head."""
    floor: int
    """GPUs of the decode kind by memory alone, with the model's own KV heads."""
    prefill: PoolFit
    decode: PoolFit
    collocated: PoolFit | None
    transfer: float
    """Bytes/s of KV that each prefill GPU sends, over what its network card carries."""
    apart: Fit | None = None
    """The same if nothing of a step's reading hid behind its products; None where the overlap is known."""

    @property
    def gpus(self) -> int:
        """GPUs of both pools."""
        return self.prefill.gpus + self.decode.gpus

    @property
    def ratio(self) -> tuple[int, int]:
        """Prefill to decode workers in lowest terms."""
        common = gcd(self.prefill.workers, self.decode.workers)
        return self.prefill.workers // common, self.decode.workers // common

    @property
    def cost(self) -> Cost | None:
        """None without prices."""
        return _cost(self.load, _per_hour(self.prefill, self.hardware), _per_hour(self.decode, self.hardware))

    @property
    def collocated_cost(self) -> Cost | None:
        """None without prices, or where collocated workers cannot meet the targets."""
        if self.collocated is None:
            return None
        return _cost(self.load, 0.0, _per_hour(self.collocated, self.hardware))

    @property
    def collocated_is_better(self) -> bool:
        """Whether workers that do both meet the same targets for less money, or without prices on fewer GPUs; equal
        counts too: one pool is simpler."""
        if self.collocated is None:
            return False
        ours, theirs = self.cost, self.collocated_cost
        if ours is not None and theirs is not None:
            return theirs.per_hour <= ours.per_hour
        return self.collocated.gpus <= self.gpus

    @property
    def is_undecided(self) -> bool:
        """Whether one pool or two are better depends on an overlap that was not measured."""
        return self.apart is not None and self.apart.collocated_is_better != self.collocated_is_better

    @property
    def takes_one_pool(self) -> bool:
        """Whether one pool is better, whatever the overlap; where that decides, two pools are the safer choice: what
        they need hardly depends on it."""
        return self.collocated_is_better and not self.is_undecided


def fit(model: ModelShape, load: Load, hardware: Hardware) -> Fit:
    """Sizes everything. Raises ConfigError with the reason where the load cannot be served.

    Without a known overlap the two ends are taken: `apart` is the other one, and None where it cannot be served.
    """
    if hardware.overlap is not None or hardware.measured is not None:
        return _fit(model, load, hardware)
    found = _fit(model, load, hardware)
    with contextlib.suppress(ConfigError):
        return replace(found, apart=_fit(model, load, replace(hardware, overlap=0.0)))
    return found


def _fit(model: ModelShape, load: Load, hardware: Hardware) -> Fit:
    if model.max_positions and load.context > model.max_positions:
        raise ConfigError(
            f"--context {load.context} is beyond the model's {model.max_positions} positions",
            field="context",
            limit=model.max_positions,
            value=load.context,
        )
    prefill, decode = prefill_pool(model, load, hardware), decode_pool(model, load, hardware)
    floors = [
        gpus_by_memory(
            model, load.context, load.concurrency, hardware.decode_gpu.memory_bytes,
            mha=mha, weights=hardware.weights, kv_dtype=hardware.kv_dtype,
        )
        for mha in (True, False)
    ]  # fmt: skip
    collocated = collocated_pool(model, load, hardware, 4 * (prefill.gpus + decode.gpus))
    gpu = hardware.prefill_gpu
    sent = load.rate * load.prompt_len * model.kv_bytes(model.num_kv_heads, hardware.kv_dtype, load.prompt_len)
    transfer = sent / (prefill.gpus * gpu.link * gpu.link_efficiency)
    return Fit(model, load, hardware, floors[0], floors[1], prefill, decode, collocated, transfer)


def _per_hour(pool: PoolFit, hardware: Hardware) -> float | None:
    price = hardware.prefill_price if pool.role == "prefill" else hardware.decode_price
    return None if price is None else price * pool.gpus


def _cost(load: Load, prefill: float | None, decode: float | None) -> Cost | None:
    if prefill is None or decode is None:
        return None
    prompts, outputs = (load.rate * tokens * 3600 / 1e6 for tokens in (load.prompt_len, load.output_len))
    return Cost(prefill + decode, prefill / prompts, decode / outputs, (prefill + decode) / (prompts + outputs))
