"""Triton's norms, activation, rotation and experts against their torch references, on any device: run interpreted here,
on a GPU in `tests/gpu`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.activation.rules import SILU, Activation
from shared.kernels.pool_view import PoolView
from shared.kernels.torch_backend import TorchKernels

from .attention_case import pool_of_nan
from .comparing import assert_near, random_tensor, triton_kernels


def check_rms_norm(shape: tuple[int, ...], *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    kernels, reference = triton_kernels(), TorchKernels()
    x = random_tensor(*shape, dtype=dtype, device=device) * 3
    weight = random_tensor(shape[-1], dtype=dtype, device=device)
    for is_centered in (False, True):
        shifted = x + 2 * is_centered
        assert_near(
            kernels.rms_norm(shifted, weight, 1e-5, is_centered=is_centered),
            reference.rms_norm(shifted, weight, 1e-5, is_centered=is_centered),
        )
    if len(shape) == 2:
        residual = random_tensor(*shape, dtype=dtype, device=device, seed=1)
        kept = x.clone(), residual.clone()
        for actual, expected in zip(
            kernels.add_rms_norm(x, residual, weight, 1e-5),
            reference.add_rms_norm(x, residual, weight, 1e-5),
            strict=True,
        ):
            assert_near(actual, expected)
        assert torch.equal(x, kept[0])
        assert torch.equal(residual, kept[1])


def check_act_and_mul(
    num_tokens: int,
    size: int,
    activation: Activation = SILU,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    gate_up = random_tensor(num_tokens, 2 * size, dtype=dtype, device=device) * 4
    assert_near(triton_kernels().act_and_mul(gate_up, activation), TorchKernels().act_and_mul(gate_up, activation))


def check_experts(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    sizes: tuple[int, int] = (48, 40),
    part: tuple[int, int] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    activation: Activation = SILU,
) -> None:
    """`sizes`: hidden and of an expert; `part`: the range of experts there is, all by default."""
    hidden, inner = sizes
    first, last = part or (0, num_experts)
    gate_up = random_tensor(last - first, 2 * inner, hidden, dtype=dtype, device=device) / hidden**0.5
    down = random_tensor(last - first, hidden, inner, dtype=dtype, device=device, seed=1) / inner**0.5
    x = random_tensor(num_tokens, hidden, dtype=dtype, device=device, seed=2)
    # Some experts that most tokens choose, others that none does.
    merits = random_tensor(num_tokens, num_experts, dtype=torch.float32, device=device) + torch.linspace(
        0, 6, num_experts, device=device
    )
    weights, ids = merits.softmax(-1).topk(top_k)
    made = {"own": False, "activation": activation}
    found = triton_kernels().make_experts(gate_up, down, first, **made).forward(x, ids, weights)
    assert found.dtype == dtype
    assert_near(found, TorchKernels.make_experts(gate_up, down, first, **made).forward(x, ids, weights))


def check_rotate_and_write(
    *,
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    norms: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Strided inputs, a pool that must keep every other slot, and the placed query."""
    num_heads, num_kv_heads = heads
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = random_tensor(num_tokens, sum(sizes), dtype=dtype, device=device)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, dim=-1))
    angles = 6 * torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    q_norm, k_norm = (random_tensor(head_dim, dtype=dtype, device=device, seed=s) if norms else None for s in (1, 2))
    num_blocks = num_tokens + 2
    order = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))
    slots = order[:num_tokens].to(device)
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    pools = [pool_of_nan(shape, kv_dtype or dtype, device) for _ in range(2)]
    placed = [
        kernels.rotate_and_write(query, key, value, cos, sin, pool, 1, slots, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
        for kernels, pool in zip((triton_kernels(), TorchKernels()), pools, strict=True)
    ]
    assert placed[0].is_contiguous()
    assert_near(placed[0], placed[1])
    for found, expected in zip(taken_out(pools[0], slots), taken_out(pools[1], slots), strict=True):
        if found.dtype == torch.int8:  # neighbours of one sign differ by 1, in fp8 too
            assert int((found.int() - expected.int()).abs().max()) <= 1
            assert bool(found.any())
        else:
            assert_near(found, expected)
    assert bool((pools[0].memory == 255).all()), "another slot was written to"


def taken_out(pool: PoolView, slots: Tensor) -> list[Tensor]:
    """What lies in slots of layer 1, [num_tokens, 2, num_kv_heads, head_dim]; of codes as int8, with their scales.
    The slots are left with all bits set."""
    places = (slots // pool.block_size, 1, slice(None), slice(None), slots % pool.block_size)
    found = [pool.rows.view(torch.int8)[places] if pool.has_scales else pool.rows[places]]
    pool.rows.view(torch.uint8)[places] = 255
    if pool.has_scales:
        found.append(pool.scales[places])
        pool.scales.view(torch.int32)[places] = -1
    return found


def check_negative_slots_are_not_written(device: str = "cpu") -> None:
    heads = random_tensor(3, 2, 8, dtype=torch.float32, device=device)
    angles = torch.ones(3, 8, device=device)
    pool = torch.zeros(2, 1, 2, 2, 4, 8, device=device)
    slots = torch.tensor([5, -1, -1], device=device)
    triton_kernels().rotate_and_write(
        heads, heads, heads, angles, angles, PoolView.over(pool), 0, slots, q_norm=None, k_norm=None, eps=1e-6
    )
    assert torch.equal(pool[1, 0, 1, :, 1], heads[0])
    assert int((pool != 0).any(dim=-1).sum()) == 4
