"""The duration of an engine step: six coefficients, and two more for models with experts.

decode step  = fixed + batch · sequence + (KV tokens of the batch) · kv + experts · (1 - unread ^ batch)
chunk        = fixed + n · token + n · (tokens before it + n / 2) · attention, and no less than a decode step's fixed
mixed step   = decode step + the chunk without its fixed part
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.sizing.shapes import BYTES_PER_VALUE, GpuShape, ModelShape

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

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Time of a prompt's next `num_tokens` after `num_before`, without the step's fixed part."""
        return num_tokens * (self.token_s + self.attention_s * (num_before + num_tokens / 2))

    def prefill_step_s(self, chunks_s: float) -> float:
        """Time of a step of chunks only, which take `chunks_s` together and read all experts."""
        return max(self.chunk_fixed_s + chunks_s, self.decode_fixed_s + self.experts_s)

    def decode_step_s(self, batch: int, num_kv_tokens: int) -> float:
        """Time of one token for each of `batch` sequences."""
        experts_s = self.experts_s * (1 - self.unread_share**batch)
        return self.decode_fixed_s + batch * self.sequence_s + num_kv_tokens * self.kv_s + experts_s


def roofline(
    model: ModelShape, gpu: GpuShape, num_gpus: int, weights: str = "bf16", kv_dtype: str = "bf16"
) -> StepTimes:
    """Step times of a tensor-parallel group: compute-bound chunks, decode steps that read weights and KV once.

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
