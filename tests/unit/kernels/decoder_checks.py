"""Triton's norms, activation, rotation and experts against their torch references, on any device: run interpreted here,
on a GPU in `tests/gpu`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shared.kernels.activation.activations import SILU, Activation
from shared.kernels.experts.routing_rules import Routing
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


def check_few_rows(num_rows: int, in_size: int, out_size: int, *, dtype: torch.dtype, device: str = "cpu") -> None:
    """The product of few rows in all its tiles, with and without a bias, beside the exact one."""
    from shared.kernels.matmul.few import COLUMNS, NARROW, WIDE, multiply

    x, weight, bias = (
        random_tensor(*shape, dtype=dtype, device=device)
        for shape in ((num_rows, in_size), (out_size, in_size), (out_size,))
    )
    tickets = torch.zeros(out_size // COLUMNS, dtype=torch.int32, device=device)
    for config in (NARROW, WIDE) if num_rows in NARROW.rows else (WIDE,):
        for added in (None, bias):
            found = multiply(x, weight, added, tickets, config)
            exact = x.double() @ weight.double().t() + (0 if added is None else added.double())
            assert_near(found / in_size**0.5, exact / in_size**0.5)
            assert not tickets.any()


def check_captured_few_rows() -> None:
    """Layers one behind the other in a CUDA graph, replayed with other numbers: each begins while the last one ends."""
    from shared.kernels.matmul.few import FewRowsLinear

    sizes = (4096, 6144, 4096, 28_672, 4096)
    layers = [
        FewRowsLinear(random_tensor(after, before, dtype=torch.bfloat16, device="cuda", seed=after) / before**0.5, None)
        for before, after in pairwise(sizes)
    ]

    def through(layers: list[FewRowsLinear], rows: Tensor) -> Tensor:
        for layer in layers:
            rows = triton_kernels().rms_norm(layer.forward(rows), layer.weight.new_ones(layer.out_size), 1e-6)
        return rows

    for num_rows in (1, 32, 64):
        x = random_tensor(num_rows, sizes[0], dtype=torch.bfloat16, device="cuda")

        through(layers, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = through(layers, x)
        for seed in range(1, 6):
            x.copy_(random_tensor(num_rows, sizes[0], dtype=torch.bfloat16, device="cuda", seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            expected = x
            for layer in layers:
                rows = torch.nn.functional.linear(expected, layer.weight)
                expected = TorchKernels.rms_norm(rows, layer.weight.new_ones(layer.out_size), 1e-6)
            assert (found - expected).abs().max() < 0.1, f"{num_rows} rows"


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
    weights, inputs = _experts_case(num_tokens, num_experts, top_k, sizes, part, device, dtype)
    made = {"own": False, "activation": activation}
    found = triton_kernels().make_experts(*weights, **made).forward(*inputs)
    assert found.dtype == dtype
    assert_near(found, TorchKernels.make_experts(*weights, **made).forward(*inputs))


def check_torchs_product(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    sizes: tuple[int, int],
    part: tuple[int, int],
    device: str = "cpu",
) -> None:
    """The way that many rows go, in bf16: as above, with experts that no token chose."""
    weights, inputs = _experts_case(num_tokens, num_experts, top_k, sizes, part, device, torch.bfloat16)
    found = triton_kernels().make_experts(*weights, own=False).by_torch(*inputs)
    assert_near(found, TorchKernels.make_experts(*weights, own=False).forward(*inputs))


def check_every_tiling(config: object, *, device: str) -> None:
    """Tiles of an `ExpertsConfig` over sizes that fill none, in bf16."""
    weights, inputs = _experts_case(700, 6, 2, (520, 328), (1, 6), device, torch.bfloat16)
    found = triton_kernels().make_experts(*weights, own=False).by_tiles(*inputs, config)
    assert_near(found, TorchKernels.make_experts(*weights, own=False).forward(*inputs))


def check_sorted_pairs(
    num_tokens: int, num_experts: int, top_k: int, first_expert: int, *, device: str = "cpu"
) -> None:
    """One launch sorts as torch's ops do; some ids lie before the range, some past it, -1 nowhere."""
    from unittest.mock import patch

    from shared.kernels.experts import launch

    merits = random_tensor(num_tokens, num_experts + 4, dtype=torch.float32, device=device)
    ids = merits.argsort(1)[:, :top_k].contiguous() - 1
    found = launch.sort_pairs(ids, first_expert, num_experts, 16)
    with patch.object(launch, "COMPARED_PAIRS", 0):
        expected = launch.sort_pairs(ids, first_expert, num_experts, 16)
    assert found.most_tiles == expected.most_tiles >= int(found.tile_ends[-1])
    for name in ("local_ids", "order", "row_ends", "tile_ends"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def check_choice(routing: Routing, logits: Tensor, bias: Tensor | None) -> None:
    """The same ids, and nearly the same weights, for both dtypes of logits."""
    for dtype in (torch.float32, torch.bfloat16):
        ids, weights = triton_kernels().choose_experts(logits.to(dtype), bias, routing)
        expected_ids, expected = TorchKernels.choose_experts(logits.to(dtype), bias, routing)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7, equal_nan=True)


def check_choices(names: tuple[str, ...], *, device: str = "cpu") -> None:
    """Distinct logits, equal ones (the first is chosen), both zeros, infinite ones and NaN, by named routings."""
    from .routing_case import FAMILIES, ROUTINGS

    for name in names:
        routing = (ROUTINGS | FAMILIES)[name]
        size = routing.num_experts
        bias = random_tensor(size, dtype=torch.float32, device=device, seed=1) / 8 if routing.has_bias else None
        logits = random_tensor(37, size, dtype=torch.float32, device=device)
        check_choice(routing, logits, bias)
        ties = torch.zeros(4, size, device=device)
        ties[1, ::2] = -0.0
        ties[2, size // 2 :] = 1.0
        ties[3] = float("-inf")
        ties[3, 0] = 0.0
        check_choice(routing, ties, None if bias is None else torch.zeros_like(bias))
        odd = logits[:3].clone()
        odd[0, size - 1] = odd[1, size // 2] = float("nan")
        odd[2, 3] = float("inf")
        check_choice(routing, odd, bias)
        check_choice(routing, logits[:0], bias)


def _experts_case(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    sizes: tuple[int, int],
    part: tuple[int, int] | None,
    device: str,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """((gate_up, down, first expert), (x, ids, weights))."""
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
    return (gate_up, down, first), (x, ids, weights)


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


def check_placed_latents(
    *,
    num_tokens: int,
    num_heads: int,
    dims: tuple[int, int, int],
    is_interleaved: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """`dims`: rank, of a query that is not rotated, rotated. Strided inputs; every second token pads a batch, and the
    pool keeps all other slots to the bit."""
    rank, nope, rope = dims
    wide = random_tensor(num_tokens, num_heads * (nope + rope) + rank + rope, dtype=dtype, device=device)
    query, latent = wide.split([num_heads * (nope + rope), rank + rope], dim=-1)
    angles = 6 * torch.rand(num_tokens, rope // 2, generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    norm = random_tensor(rank, dtype=dtype, device=device, seed=1)
    order = torch.randperm(16 * (num_tokens + 2), generator=torch.Generator().manual_seed(1))
    slots = order[:num_tokens].to(device)
    pools = [pool_of_nan((num_tokens + 2, 3, 1, 1, 16, rank + rope), kv_dtype or dtype, device) for _ in range(2)]
    made = {"norm": norm, "eps": 1e-6, "is_interleaved": is_interleaved}
    padded = torch.where(torch.arange(num_tokens, device=device) % 2 == 0, slots, -1)
    placed = [
        kernels.rotate_and_write_latent(query.unflatten(1, (num_heads, -1)), latent, cos, sin, pool, 1, where, **made)
        for kernels, pool, where in zip((triton_kernels(), TorchKernels()), pools, (padded, slots), strict=True)
    ]
    assert placed[0].is_contiguous()
    assert_near(placed[0], placed[1])
    found, expected = (pool.rows[:, :, 0, 0].transpose(1, 2).flatten(0, 1) for pool in pools)
    assert_near(found[slots[::2], 1], expected[slots[::2], 1])
    found[slots[::2], 1] = float("nan")
    assert bool(found.isnan().all())


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
