"""Memory: weights plus KV must fit. All in bytes, GB = 10⁹, GiB = 2³⁰."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.sizing.adapter_memory import share_of_rank
from shared.sizing.devices import GpuShape
from shared.sizing.load import Hardware
from shared.sizing.shapes import BYTES_PER_VALUE, ModelShape
from shared.sizing.spread import Spread

GB = 1e9


@dataclass(frozen=True, slots=True)
class Room:
    """Memory and KV blocks of one worker."""

    spread: Spread
    weight_bytes: float
    """Bytes of the weights on the GPU that has the most."""
    kv_bytes_per_token: float
    """Bytes of a token's KV on that GPU."""
    kv_tokens: int
    """Tokens whose KV fits; 0 or less: the weights do not fit."""


def room(model: ModelShape, gpu: GpuShape, spread: Spread, hardware: Hardware, context: int = 0) -> Room:
    """weights of a GPU + tokens · KV a token and GPU ≤ memory · share, solved for the tokens: those of sequences of
    `context` tokens, where layers have windows. Weights are also those of a head and of adapters that lie ready; with a
    draft model this is the GPU that has it."""
    weight_bytes = model.params_per_gpu(spread) * BYTES_PER_VALUE[hardware.weights]
    kv_bytes = model.kv_bytes_per_gpu(spread.tensor, hardware.kv_dtype, spread.pipeline, context)
    weight_bytes += share_of_rank(hardware.adapter_bytes(model), spread.tensor, spread.expert)
    if hardware.has_head:
        weight_bytes += model.head_params * BYTES_PER_VALUE[hardware.weights]
        kv_bytes += model.kv_bytes(model.num_kv_heads, hardware.kv_dtype) / model.kv_layers
    if hardware.draft is not None:
        weight_bytes += hardware.draft.weight_bytes
        kv_bytes += hardware.draft.kv_bytes_per_token
    free = gpu.memory_bytes * hardware.memory_share - weight_bytes
    return Room(spread, weight_bytes, kv_bytes, math.floor(free / kv_bytes))


def rooms(model: ModelShape, gpu: GpuShape, name: str, context: int, hardware: Hardware) -> list[Room]:
    """The sizes of a worker that hold the weights and one sequence of `context` tokens.

    Raises ConfigError, which says what is too large for what.
    """
    found = [room(model, gpu, spread, hardware, context) for spread in hardware.spreads(model)]
    fitting = [one for one in found if one.kv_tokens >= context]
    if fitting:
        return fitting
    largest = max(found, key=lambda one: one.kv_tokens)
    usable = gpu.memory_bytes * hardware.memory_share * largest.spread.num_ranks / GB
    where = f"{largest.spread.num_ranks} × {name} ({usable:.0f} GB usable at --memory-share {hardware.memory_share:g})"
    weights = model.num_params * BYTES_PER_VALUE[hardware.weights] / GB
    if largest.kv_tokens < 1:
        adapters = hardware.adapter_bytes(model) / GB
        beside = f" and {adapters:.3g} GB of adapters" if adapters else ""
        raise ConfigError(
            f"{weights:.0f} GB of {hardware.weights} weights{beside} do not fit {where}: use narrower --weights, a "
            "larger --gpu, a larger --max-tensor or --max-pipeline",
            field="max_tensor",
            limit=hardware.max_tensor,
        )
    raise ConfigError(
        f"beside {weights:.0f} GB of {hardware.weights} weights, {where} hold the {hardware.kv_dtype} KV of "
        f"{largest.kv_tokens} tokens, less than --context {context}",
        field="context",
        limit=largest.kv_tokens,
        value=context,
    )


def gpus_by_memory(
    model: ModelShape,
    context: int,
    sequences: int,
    memory_bytes: float,
    *,
    mha: bool,
    weights: str = "bf16",
    kv_dtype: str = "bf16",
) -> int:
    """GPUs that hold weights and KV if not a byte is lost: (weights + KV a token · context · sequences) / memory.

    `mha`: as if each attention head had K and V of its own, 2 · layers · hidden values a token.
    """
    heads = model.num_heads if mha else model.num_kv_heads
    kv_bytes = model.kv_bytes(heads, kv_dtype, context) * context * sequences
    return math.ceil((model.num_params * BYTES_PER_VALUE[weights] + kv_bytes) / memory_bytes)
