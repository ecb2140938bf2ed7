"""The options of `tandem fit`, and the load and hardware that they describe."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shared.errors import ConfigError
from shared.sizing.adapter_memory import RANK_CLASSES
from shared.sizing.devices import GPUS, device_name, gpu_of
from shared.sizing.load import Hardware, Load
from shared.sizing.measured_steps import measured
from shared.sizing.shapes import BYTES_PER_VALUE, KV_CODES, KV_DTYPES, ModelShape
from shared.sizing.spread import MOST_RANKS
from tandem_cli.fit.shape import draft_of
from tandem_cli.quantities import between, count_of, seconds_of

_MAX_TOKENS = 10_000_000
_MAX_SEQUENCES = 1_000_000
_MAX_ADAPTERS = 4096
_DEFAULT_OUTPUT = 500
_TTFT, _TPOT = "1s", "40ms"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is to be served, and how fast."""

    context: Annotated[
        str, typer.Option("--context", help="Longest sequence, prompt and answer: memory is kept for it. 128k, 8192.")
    ] = "8k"
    concurrency: Annotated[str, typer.Option("--concurrency", help="Sequences at once.")] = "32"
    prompt: Annotated[str, typer.Option("--prompt", help="Mean prompt; default: an eighth of the context.")] = ""
    output: Annotated[
        str, typer.Option("--output", help=f"Mean answer; default: {_DEFAULT_OUTPUT}, at most half the context.")
    ] = ""
    ttft: Annotated[
        str,
        typer.Option(
            "--ttft", help=f"Target for the time to the first token; default: {_TTFT}, with --trace the router's."
        ),
    ] = ""
    tpot: Annotated[
        str, typer.Option("--tpot", help=f"Target for the time per further token; default: {_TPOT}, likewise.")
    ] = ""
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests/s; default: what keeps --concurrency busy if the targets are just met."),
    ] = None

    @property
    def ttft_s(self) -> float | None:
        """Target of the TTFT; None where none is given. Raises ConfigError."""
        return seconds_of(self.ttft, "ttft", 3600.0) if self.ttft else None

    @property
    def tpot_s(self) -> float | None:
        """Target of the TPOT; None where none is given. Raises ConfigError."""
        return seconds_of(self.tpot, "tpot", 60.0) if self.tpot else None

    def load(self) -> Load:
        """Raises ConfigError."""
        num_context = count_of(self.context, "context", _MAX_TOKENS, least=2)
        sequences = count_of(self.concurrency, "concurrency", _MAX_SEQUENCES)
        answer = count_of(self.output, "output", _MAX_TOKENS) if self.output else min(_DEFAULT_OUTPUT, num_context // 2)
        asked = count_of(self.prompt, "prompt", _MAX_TOKENS) if self.prompt else max(1, num_context // 8)
        ttft_s = seconds_of(self.ttft or _TTFT, "ttft", 3600.0)
        tpot_s = seconds_of(self.tpot or _TPOT, "tpot", 60.0)
        rate = Load.rate_of(sequences, answer, ttft_s, tpot_s) if self.rate is None else self.rate
        return Load(num_context, sequences, asked, answer, ttft_s, tpot_s, between(rate, "rate", 1e-6, 10_000.0))


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The hardware that may serve the load."""

    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", help=f"GPU of both pools: {', '.join(GPUS)}, or in numbers, memory=24G,bandwidth=60G,flops=900G."
        ),
    ] = "H200"
    prefill_gpu: Annotated[str, typer.Option("--prefill-gpu", help="Another GPU for prefill workers.")] = ""
    decode_gpu: Annotated[str, typer.Option("--decode-gpu", help="Another GPU for decode workers.")] = ""
    weights: Annotated[str, typer.Option("--weights", help=f"Weights: {', '.join(BYTES_PER_VALUE)}.")] = "bf16"
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help=f"KV: {', '.join(KV_DTYPES)}.")] = "bf16"
    max_tensor: Annotated[int, typer.Option("--max-tensor", help="Most GPUs that split a worker's layers.")] = 8
    max_pipeline: Annotated[
        int, typer.Option("--max-pipeline", help="Most stages of a worker, each of that many GPUs.")
    ] = 1
    node_gpus: Annotated[
        int, typer.Option("--node-gpus", help="GPUs of a machine; beyond, ranks reach each other over the network.")
    ] = 8
    memory_share: Annotated[
        float, typer.Option("--memory-share", help="Share of a GPU's memory for weights and KV.")
    ] = 0.9
    overlap: Annotated[
        float | None,
        typer.Option(
            "--overlap",
            help="Share, 0 to 1, of the shorter one of reading weights and products that costs a step no time; "
            "default: not known, both ends are tried.",
        ),
    ] = None
    draft: Annotated[
        str, typer.Option("--draft", help="Draft model of workers that decode: a folder or a name, as MODEL.")
    ] = ""
    heads: Annotated[
        bool, typer.Option("--heads", help="With the checkpoint's layer that guesses: workers of one device each.")
    ] = False
    adapters: Annotated[
        int, typer.Option("--adapters", help="LoRA adapters that lie ready on each worker (its adapter_slots).")
    ] = 0
    adapter_copies: Annotated[
        int,
        typer.Option("--adapter-copies", help="LoRA adapters that each worker's host keeps (its adapter_host_bytes)."),
    ] = 0
    adapter_rank: Annotated[int, typer.Option("--adapter-rank", help="Rank of these.")] = 16
    steps: Annotated[
        Path | None,
        typer.Option(
            "--steps", help="Step times measured on one GPU (loadtest.bench step-times --out FILE): for its workers."
        ),
    ] = None

    def hardware(self, shape: ModelShape, prices: PriceOptions) -> Hardware:
        """Raises ConfigError."""
        if self.heads and not shape.head_params:
            raise ConfigError("--heads: the model has no layer that guesses", field="heads")
        return Hardware(
            prefill_gpu=gpu_of(self.prefill_gpu or self.gpu, "prefill-gpu" if self.prefill_gpu else "gpu"),
            decode_gpu=gpu_of(self.decode_gpu or self.gpu, "decode-gpu" if self.decode_gpu else "gpu"),
            prefill_name=device_name(self.prefill_gpu or self.gpu),
            decode_name=device_name(self.decode_gpu or self.gpu),
            weights=_one_of(self.weights, "weights", BYTES_PER_VALUE),
            kv_dtype=_kv_dtype(self.kv_dtype, shape),
            memory_share=between(self.memory_share, "memory-share", 0.1, 1.0),
            max_tensor=int(between(self.max_tensor, "max-tensor", 1, MOST_RANKS)),
            max_pipeline=int(between(self.max_pipeline, "max-pipeline", 1, MOST_RANKS)),
            node_devices=int(between(self.node_gpus, "node-gpus", 1, 1024)),
            overlap=None if self.overlap is None else between(self.overlap, "overlap", 0.0, 1.0),
            measured=None if self.steps is None else measured(self.steps, "steps"),
            prefill_price=prices.prefill,
            decode_price=prices.decode,
            draft=draft_of(self.draft, shape) if self.draft else None,
            has_head=self.heads,
            adapter_slots=self._num_adapters(shape, self.adapters, "adapters"),
            adapter_copies=self._num_adapters(shape, self.adapter_copies, "adapter-copies"),
            adapter_rank=int(between(self.adapter_rank, "adapter-rank", 1, RANK_CLASSES[-1])),
        )

    def _num_adapters(self, shape: ModelShape, count: int, option: str) -> int:
        if count and not shape.adapter_values:
            raise ConfigError(f"--{option}: adapters of this model are not supported", field=option)
        return int(between(count, option, 0, _MAX_ADAPTERS))


@dataclass(frozen=True, slots=True)
class PriceOptions:
    """In any currency. Without prices no cost is shown."""

    price: Annotated[
        float | None, typer.Option("--price", help="Price of a GPU and hour; default: none, no cost is shown.")
    ] = None
    prefill_price: Annotated[float | None, typer.Option("--prefill-price", help="Of a prefill GPU.")] = None
    decode_price: Annotated[float | None, typer.Option("--decode-price", help="Of a decode GPU.")] = None
    token_price: Annotated[
        float | None,
        typer.Option("--token-price", help="Of a million tokens elsewhere: from how many on own GPUs cost less."),
    ] = None

    @property
    def prefill(self) -> float | None:
        """Price of a prefill GPU's hour. Raises ConfigError."""
        return _price(self.prefill_price if self.prefill_price is not None else self.price, "prefill-price")

    @property
    def decode(self) -> float | None:
        """Price of a decode GPU's hour. Raises ConfigError."""
        return _price(self.decode_price if self.decode_price is not None else self.price, "decode-price")

    @property
    def tokens(self) -> float | None:
        """Price of a million of them. Raises ConfigError."""
        return None if self.token_price is None else between(self.token_price, "token-price", 1e-9, 1e6)


def _price(value: float | None, option: str) -> float | None:
    return None if value is None else between(value, option, 0.0, 1e6)


def _one_of(name: str, option: str, known: Collection[str]) -> str:
    if name not in known:
        raise ConfigError(f"--{option}: {name!r} is not one of {', '.join(known)}", field=option, value=name)
    return name


def _kv_dtype(name: str, shape: ModelShape) -> str:
    return _one_of(name, "kv-dtype", KV_DTYPES if shape.latent is None else KV_DTYPES[: -len(KV_CODES)])
