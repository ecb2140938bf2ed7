"""What a worker's ranks send each other in a step, in seconds.

tensor      two sums a layer, behind attention and behind the feed-forward block or the experts: in a ring each rank
            sends 2 · (t - 1) / t of the token's hidden values
pipeline    the hidden values once from each stage to the next one
experts     nothing besides: all ranks of a stage have all its tokens, so none is sent to its experts (there is no
            all-to-all), and what comes back is the layer's second sum
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.sizing.devices import GpuShape
from shared.sizing.shapes import ModelShape
from shared.sizing.spread import Spread

HIDDEN_BYTES = 2
"""Bytes of a value between two layers."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Time that ranks take to exchange what all layers need. Seconds."""

    token_s: float
    """Seconds for each token, by the bytes exchanged."""
    pass_s: float
    """Seconds of latency for each pass through all stages, however few its tokens."""


def exchange(model: ModelShape, gpu: GpuShape, spread: Spread, node_devices: int = 8) -> Exchange:
    """Where a stage's ranks are more than a machine's devices, their sums cross the network; stages cross it where all
    ranks together are more. The logits' candidates are not counted."""
    tensor, hops = spread.tensor, spread.pipeline - 1
    token_bytes = model.hidden * HIDDEN_BYTES
    num_sums = 2 * model.num_layers if tensor > 1 else 0
    sums_s = num_sums * 2 * (tensor - 1) / tensor * token_bytes / _rate(gpu, tensor <= node_devices)
    hops_s = hops * token_bytes / _rate(gpu, spread.num_ranks <= node_devices)
    return Exchange(sums_s + hops_s, (num_sums + hops) * gpu.latency_s)


def _rate(gpu: GpuShape, is_near: bool) -> float:
    """Bytes/s; `is_near`: within a machine."""
    return (gpu.peer if is_near and gpu.peer else gpu.link) * gpu.link_efficiency
