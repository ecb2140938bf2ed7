"""What each way to spread a model over ranks takes: memory a rank, and where a step's time goes."""

from __future__ import annotations

from dataclasses import dataclass

from shared.sizing.devices import GpuShape
from shared.sizing.exchange import exchange
from shared.sizing.load import Hardware, Load
from shared.sizing.memory import room
from shared.sizing.shapes import ModelShape
from shared.sizing.spread import Spread


@dataclass(frozen=True, slots=True)
class DegreeFit:
    """One worker of these degrees."""

    spread: Spread
    weight_bytes: float
    """Bytes of the weights on the rank that has the most."""
    kv_bytes_per_token: float
    """Bytes of a token's KV on that rank."""
    kv_tokens: int
    """Tokens whose KV the worker holds; 0 or less: the weights do not fit."""
    sequences: int
    """Sequences of the load's context that it holds; 0: not one."""
    prompt_s: float
    """Time of the load's mean prompt alone."""
    batch: int
    """Sequences of the decode step below: as many as the load has at once and the worker holds, at least one."""
    step_s: float
    exchange_s: float
    """Time of that step in which its ranks send each other what they need."""
    bubble: float
    """Share of that step in which a stage waits for others."""
    experts_read: float
    """Share of its experts that the busiest rank reads in that step; 0 without experts."""

    @property
    def fits(self) -> bool:
        """Whether the weights and one sequence have room."""
        return self.sequences > 0


def degree_fits(model: ModelShape, load: Load, gpu: GpuShape, hardware: Hardware) -> list[DegreeFit]:
    """Every spread of `hardware`, fewest ranks first; where there are experts, with whole ones on a rank too."""
    spreads = [
        Spread(spread.tensor, spread.pipeline, groups)
        for spread in hardware.spreads(model)
        for groups in _groups(model, spread.tensor)
    ]
    return [_degree_fit(model, load, gpu, hardware, spread) for spread in spreads]


def _groups(model: ModelShape, tensor: int) -> list[int]:
    """1, and where there are experts, powers of two that divide them and the stage's ranks."""
    if model.experts is None:
        return [1]
    num_experts = model.experts.num_experts
    return [1 << i for i in range(10) if tensor % (1 << i) == 0 and num_experts % (1 << i) == 0]


def _degree_fit(model: ModelShape, load: Load, gpu: GpuShape, hardware: Hardware, spread: Spread) -> DegreeFit:
    held = room(model, gpu, spread, hardware, load.context)
    sequences = max(0, held.kv_tokens // load.context)
    batch = max(1, min(load.concurrency, sequences))
    times = hardware.step_times(model, gpu, spread)
    sent = exchange(model, gpu, spread, hardware.node_devices)
    parts, passes = times.through(batch)
    return DegreeFit(
        spread,
        held.weight_bytes,
        held.kv_bytes_per_token,
        held.kv_tokens,
        sequences,
        prompt_s=times.prompt_s(load.prompt_len),
        batch=batch,
        step_s=times.decode_step_s(batch, batch * (load.prompt_len + load.output_len // 2)),
        exchange_s=passes * (sent.pass_s + sent.token_s * batch / parts),
        bubble=times.bubble(batch),
        experts_read=0.0 if model.experts is None else times.read_share(batch / parts),
    )
