"""Triton's ops with the Gluon prefill attention for Hopper. Imports Gluon; the registry does so only where it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.attention.decode.launch import decode_attention
from shared.kernels.attention.hopper import launch as hopper
from shared.kernels.attention.paged import has_decodes
from shared.kernels.attention.prefill.launch import prefill_attention
from shared.kernels.attention.prefill.schedule import longest_chunk
from shared.kernels.backends.triton import TritonKernels
from shared.kernels.batch import AttentionBatch


class HopperKernels(TritonKernels):
    """`Kernels` for compute capability 9.0. Compiled, never run yet: `auto` does not choose it."""

    name = "triton-hopper"

    serves_latents = False

    @staticmethod
    def paged_attention(
        query: Tensor, kv_blocks: Tensor, layer: int, batch: AttentionBatch, *, scale: float, window: int | None
    ) -> Tensor:
        """`DecoderOps.paged_attention`; chunks of other shapes than the kernel has code for take the portable one."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if has_decodes(batch):
            decode_attention(query, kv_blocks, layer, batch, output, scale=scale, window=window)
        if longest_chunk(batch):
            attend = hopper.prefill_attention if hopper.suits(query, kv_blocks) else prefill_attention
            attend(query, kv_blocks, layer, batch, output, scale=scale, window=window)
        return output.flatten(1)
