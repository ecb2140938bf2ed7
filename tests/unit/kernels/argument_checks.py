"""What the launchers of Triton's ops refuse, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .attention_case import LAYER, AttentionCase
from .comparing import triton_kernels
from .sampling_case import SamplingCase


def check_wrong_arguments_are_refused(device: str = "cpu") -> None:
    """The launchers assert what a kernel would read past or misread."""
    kernels = triton_kernels()
    case = AttentionCase([(1, 5), (3, 6)], head_dim=16, block_size=16, device=device)
    x = torch.ones(4, 16, device=device)
    heads, pool, slots = x.view(4, 2, 8), torch.zeros(2, 1, 2, 2, 4, 8, device=device), torch.arange(4, device=device)

    def attend(query: Tensor, kv_blocks: Tensor, layer: int = LAYER) -> None:
        kernels.paged_attention(query, kv_blocks, layer, case.batch, scale=1.0, window=None)

    def place(query: Tensor, cos: Tensor, slots: Tensor) -> None:
        kernels.rotate_and_write(query, heads, heads, cos, cos, pool, 0, slots, q_norm=None, k_norm=None, eps=1e-6)

    wrong: list[Callable[[], object]] = [
        lambda: attend(case.query[1:], case.kv_blocks),
        lambda: attend(case.query.half(), case.kv_blocks),
        lambda: attend(case.query, case.kv_blocks, layer=3),
        lambda: attend(case.query[:, :3], case.kv_blocks),
        lambda: attend(case.query.transpose(0, 1).contiguous().transpose(0, 1), case.kv_blocks),
        lambda: attend(case.query, case.kv_blocks.transpose(1, 3).contiguous().transpose(1, 3)),
        lambda: place(heads.repeat(1, 1, 2)[..., ::2], x[:, :8].contiguous(), slots),
        lambda: place(heads, x[:, :8], slots),
        lambda: place(heads, x[:, :8].contiguous(), slots.int()),
        lambda: kernels.rms_norm(x.t(), torch.ones(4, device=device), 1e-6),
        lambda: kernels.rms_norm(x, torch.ones(8, device=device), 1e-6),
        lambda: kernels.add_rms_norm(x, x[:2], torch.ones(16, device=device), 1e-6),
        lambda: kernels.silu_mul(x.t()),
        lambda: kernels.silu_mul(x[:, :3].contiguous()),
        lambda: kernels.gather_blocks(pool, slots[:1].int()),
        lambda: kernels.scatter_blocks(pool[:1], pool, slots[:2]),
        lambda: kernels.block_checksums(pool.transpose(0, 3), slots[:1]),
        lambda: kernels.sample_tokens(x.half(), SamplingCase(4, 16, 0, device=device).rows),
        lambda: kernels.sample_tokens(x, SamplingCase(3, 16, 0, device=device).rows),
        lambda: kernels.mask_tokens(x, torch.zeros(4, 0, dtype=torch.int32, device=device), slots),
        lambda: kernels.mask_tokens(x, torch.zeros(4, 1, dtype=torch.int64, device=device), slots),
        lambda: kernels.mask_tokens(x, torch.zeros(3, 1, dtype=torch.int32, device=device), slots),
        lambda: kernels.mask_tokens(x.t(), torch.zeros(4, 1, dtype=torch.int32, device=device), slots),
    ]
    for index, call in enumerate(wrong):
        try:
            call()
        except AssertionError:
            continue
        raise RuntimeError(f"call {index} was not refused")
