"""The duration of an engine step: six coefficients, and more for models with experts and for several ranks.

decode step  = fixed + batch · sequence + (KV tokens of the batch) · kv + experts · share read
chunk        = fixed + n · token + n · (tokens before it + n / 2) · attention, and no less than a decode step's fixed
mixed step   = decode step + the chunk without its fixed part

Through s stages a step goes in m parts, one behind the other, m being the number of its sequences or s: the time of one
part on one stage, m + s - 1 times. Compute and KV are split among the parts, so they take (m + s - 1) / (m · s) of what
they take without; weights are read for every part, (m + s - 1) / s times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shared.sizing.devices import GpuShape
from shared.sizing.exchange import exchange
from shared.sizing.shapes import BYTES_PER_VALUE, ModelShape
from shared.sizing.spread import Spread

STEP_OVERHEAD_S = 0.5e-3
"""Scheduling, input preparation and sampling of one step."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The coefficients, in seconds."""

    chunk_fixed_s: float
    token_s: float
    attention_s: float
    decode_fixed_s: float
    sequence_s: float
    kv_s: float
    experts_s: float = 0.0
    """Reading all experts once."""
    unread_share: float = 0.0
    """Of the experts that one token does not choose."""
    uneven: float = 0.0
    """2 · ln(g) · g / E, for E experts that lie on g groups of ranks."""
    num_stages: int = 1
    pass_s: float = 0.0
    """Of `decode_fixed_s`, what every part of a step takes that goes through the stages by itself."""

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Time of a prompt's next `num_tokens` after `num_before`, without the step's fixed part."""
        return num_tokens * (self.token_s + self.attention_s * (num_before + num_tokens / 2))

    def prefill_step_s(self, chunks_s: float, num_prompts: int = 1) -> float:
        """Time of a step of chunks only, of that many prompts, which take `chunks_s` together and read all experts."""
        parts, passes = self.through(num_prompts)
        read_s = self.decode_fixed_s + (passes - 1) * self.pass_s + passes * self.experts_s
        return max(self.chunk_fixed_s + chunks_s * passes / parts, read_s)

    def decode_step_s(self, batch: int, num_kv_tokens: int) -> float:
        """Time of one token for each of `batch` sequences."""
        parts, passes = self.through(batch)
        experts_s = self.experts_s * self.read_share(batch / parts)
        work_s = batch * self.sequence_s + num_kv_tokens * self.kv_s
        return self.decode_fixed_s + (passes - 1) * self.pass_s + work_s * passes / parts + experts_s * passes

    def growth_s(self, batch: int) -> float:
        """How much longer the next decode step is, by the KV of this one's tokens."""
        parts, passes = self.through(batch)
        return self.kv_s * batch * passes / parts

    def mixed_step_s(self, batch: int, num_kv_tokens: int, chunk_s: float) -> float:
        """Time of a decode step with a chunk beside it."""
        parts, passes = self.through(batch + 1)
        return self.decode_step_s(batch, num_kv_tokens) + chunk_s * passes / parts

    def read_share(self, num_tokens: float) -> float:
        """Of a rank's experts, those that some of `num_tokens` chose, on the rank where they are the most.

        Tokens choose at random; the most of g groups' numbers is about their mean + sqrt(2 ln g) standard deviations.
        """
        unread: float = self.unread_share**num_tokens
        return min(1.0, 1 - unread + math.sqrt(self.uneven * unread * (1 - unread)))

    def bubble(self, num_sequences: int) -> float:
        """Share of a step in which a stage waits for others."""
        parts, passes = self.through(num_sequences)
        return 1 - parts / (passes * self.num_stages)

    def through(self, num_sequences: int) -> tuple[int, float]:
        """A step's parts, and how many times as long as one part through all stages it takes."""
        parts = max(1, min(num_sequences, self.num_stages))
        return parts, (parts + self.num_stages - 1) / self.num_stages


def roofline(
    model: ModelShape, gpu: GpuShape, num_gpus: int, weights: str = "bf16", kv_dtype: str = "bf16"
) -> StepTimes:
    """Step times of `num_gpus` as if they were one, but for KV heads that several hold: compute-bound chunks, decode
    steps that read weights and KV once.

    Narrow weights are read faster; products are counted at the 16-bit rate. Of experts a decode step reads those that
    its tokens chose, in the mean; a chunk reads all.
    """
    flops = gpu.flops * gpu.flops_efficiency * num_gpus
    bandwidth = gpu.bandwidth * gpu.bandwidth_efficiency
    read_s = BYTES_PER_VALUE[weights] / (bandwidth * num_gpus)  # of a parameter
    experts = model.experts
    return StepTimes(
        chunk_fixed_s=STEP_OVERHEAD_S,
        token_s=2 * model.active_params / flops,
        attention_s=model.attention_flops / flops,
        decode_fixed_s=STEP_OVERHEAD_S + (model.num_params - model.expert_params) * read_s,
        sequence_s=2 * model.active_params / flops,
        kv_s=model.kv_bytes_per_gpu(num_gpus, kv_dtype) / bandwidth,
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
) -> StepTimes:
    """`roofline` of a group's ranks, with what they send each other and the stages' waiting. One sequence passes the
    stages one after the other: they hold more, and are no faster for it."""
    ideal, sent = roofline(model, gpu, spread.tensor, weights, kv_dtype), exchange(model, gpu, spread, node_devices)
    groups, experts = spread.expert, model.experts
    return replace(
        ideal,
        chunk_fixed_s=ideal.chunk_fixed_s + sent.pass_s,
        token_s=ideal.token_s + sent.token_s,
        decode_fixed_s=ideal.decode_fixed_s + sent.pass_s,
        sequence_s=ideal.sequence_s + sent.token_s,
        uneven=0.0 if experts is None else 2 * math.log(groups) * groups / experts.num_experts,
        num_stages=spread.pipeline,
        pass_s=ideal.decode_fixed_s - STEP_OVERHEAD_S + sent.pass_s,
    )
