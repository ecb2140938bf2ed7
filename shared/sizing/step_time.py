"""The duration of an engine step: six coefficients.

decode step  = fixed + batch · sequence + (KV tokens of the batch) · kv
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

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Time of a prompt's next `num_tokens` after `num_before`, without the step's fixed part."""
        return num_tokens * (self.token_s + self.attention_s * (num_before + num_tokens / 2))

    def prefill_step_s(self, chunks_s: float) -> float:
        """Time of a step of chunks only, which take `chunks_s` together."""
        return max(self.chunk_fixed_s + chunks_s, self.decode_fixed_s)

    def decode_step_s(self, batch: int, num_kv_tokens: int) -> float:
        """Time of one token for each of `batch` sequences."""
        return self.decode_fixed_s + batch * self.sequence_s + num_kv_tokens * self.kv_s


def roofline(
    model: ModelShape, gpu: GpuShape, num_gpus: int, weights: str = "bf16", kv_dtype: str = "bf16"
) -> StepTimes:
    """Step times of a tensor-parallel group: compute-bound chunks, decode steps that read weights and KV once.

    Narrow weights are read faster; products are counted at the 16-bit rate.
    """
    flops = gpu.flops * gpu.flops_efficiency * num_gpus
    bandwidth = gpu.bandwidth * gpu.bandwidth_efficiency
    return StepTimes(
        chunk_fixed_s=STEP_OVERHEAD_S,
        token_s=2 * model.num_params / flops,
        attention_s=model.attention_flops / flops,
        decode_fixed_s=STEP_OVERHEAD_S + model.num_params * BYTES_PER_VALUE[weights] / (bandwidth * num_gpus),
        sequence_s=2 * model.num_params / flops,
        kv_s=model.kv_bytes_per_gpu(num_gpus, kv_dtype) / bandwidth,
    )
