"""Triton's ops with FlashInfer's paged attention. The registry imports this only where both packages are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shared.kernels.attention import paged
from shared.kernels.attention.flashinfer import attend
from shared.kernels.attention.flashinfer.wrappers import Wrappers
from shared.kernels.backends.triton import TritonKernels
from shared.kernels.batch import AttentionBatch


class FlashInferKernels(TritonKernels):
    """`Kernels` for CUDA devices: a yardstick for our own attention, and one to fall back on. It has not run yet.

    Plans are made on the host, so decode steps are not captured as CUDA graphs.
    """

    name = "flashinfer"
    serves_latents = False

    def __init__(self, library: Any) -> None:
        """`library`: the module flashinfer."""
        self._wrappers = Wrappers(library)

    def paged_attention(
        self, query: Tensor, kv_blocks: Tensor, layer: int, batch: AttentionBatch, *, scale: float, window: int | None
    ) -> Tensor:
        """`DecoderOps.paged_attention`; shapes that FlashInfer has no code for take Triton's."""
        if not attend.suits(query, kv_blocks):
            return paged.paged_attention(query, kv_blocks, layer, batch, scale=scale, window=window)
        return attend.paged_attention(self._wrappers, query, kv_blocks, layer, batch, scale=scale, window=window)
