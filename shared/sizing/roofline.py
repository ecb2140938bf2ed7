"""Step times of a device by arithmetic: its rates, the model's bytes and operations."""

from __future__ import annotations

import math
from dataclasses import replace

from shared.sizing.devices import GpuShape
from shared.sizing.exchange import exchange
from shared.sizing.shapes import BYTES_PER_VALUE, ModelShape
from shared.sizing.spread import Spread
from shared.sizing.step_time import StepTimes

STEP_OVERHEAD_S = 0.5e-3
"""Scheduling, input preparation and sampling of one step."""


def roofline(
    model: ModelShape,
    gpu: GpuShape,
    num_gpus: int,
    weights: str = "bf16",
    kv_dtype: str = "bf16",
    overlap: float = 1.0,
) -> StepTimes:
    """Step times of `num_gpus` as if they were one, but for KV heads that several hold.

    Narrow weights are read faster; products are counted at the 16-bit rate. Of experts a step reads those that its
    tokens chose, in the mean. `overlap` is no arithmetic: give what was measured, or try both ends.
    """
    flops = gpu.flops * gpu.flops_efficiency * num_gpus
    bandwidth = gpu.bandwidth * gpu.bandwidth_efficiency
    read_s = BYTES_PER_VALUE[weights] / (bandwidth * num_gpus)  # of a parameter
    experts = model.experts
    state_bytes = 0 if model.states is None else 2 * model.states.nbytes  # of a sequence's states, read and written
    return StepTimes(
        fixed_s=STEP_OVERHEAD_S,
        read_s=(model.num_params - model.expert_params) * read_s,
        token_s=model.token_flops / flops,
        sequence_s=state_bytes / (bandwidth * num_gpus),
        kv_s=model.kv_bytes_per_gpu(num_gpus, kv_dtype) / bandwidth,
        attention_s=model.attention_flops / flops,
        overlap=overlap,
        experts_s=model.expert_params * read_s,
        unread_share=0.0 if experts is None else 1 - experts.top_k / experts.num_experts,
    )


def step_times(
    model: ModelShape,
    gpu: GpuShape,
    spread: Spread,
    weights: str = "bf16",
    kv_dtype: str = "bf16",
    node_devices: int = 8,
    overlap: float = 1.0,
) -> StepTimes:
    """`roofline` of a group's ranks, with what they send each other and the stages' waiting. One sequence passes the
    stages one after the other: they hold more, and are no faster for it."""
    ideal = roofline(model, gpu, spread.tensor, weights, kv_dtype, overlap)
    sent = exchange(model, gpu, spread, node_devices)
    groups, experts = spread.expert, model.experts
    return replace(
        ideal,
        token_s=ideal.token_s + sent.token_s,
        uneven=0.0 if experts is None else 2 * math.log(groups) * groups / experts.num_experts,
        num_stages=spread.pipeline,
        pass_s=sent.pass_s,
    )
