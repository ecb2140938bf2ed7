"""The C++ kernels for experts and latents, on every instruction set: what the references give, each row by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.backends.cpu import CpuKernels, DeterministicCpuKernels
from shared.kernels.batch import AttentionBatch
from shared.kernels.torch_backend import TorchKernels

from .cpu_case import DTYPES, close, random
from .isas import every_isa, needs_library

pytestmark = needs_library

SIZES = [(64, 48, 6, 2), (96, 32, 5, 5), (36, 20, 3, 1), (512, 64, 16, 4)]
"""(hidden, inner, experts, experts of a token); the third fits no vectors."""


def weights_of(hidden: int, inner: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = random(experts, 2 * inner, hidden, dtype=torch.float32, seed=1) / hidden**0.5
    down = random(experts, hidden, inner, dtype=torch.float32, seed=2) / inner**0.5
    return gate_up.to(dtype), down.to(dtype)


def choices(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    return ids, torch.rand(tokens, top_k, generator=generator)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 150])
def test_experts_give_what_torch_gives(isa: str, dtype: torch.dtype, sizes: tuple[int, ...], tokens: int) -> None:
    hidden, inner, experts, top_k = sizes
    gate_up, down = weights_of(hidden, inner, experts, dtype)
    x, (ids, weights) = random(tokens, hidden, dtype=dtype), choices(tokens, experts, top_k)
    expected = TorchKernels.make_experts(gate_up, down, 0, own=False).forward(x, ids, weights)
    found = CpuKernels(isa).make_experts(gate_up, down, 0, own=False).forward(x, ids, weights)
    close(found, expected)


@every_isa
def test_ranges_of_experts_add_up(isa: str) -> None:
    gate_up, down = weights_of(64, 48, 7, torch.float32)
    x, (ids, weights) = random(20, 64, dtype=torch.float32), choices(20, 7, 3)
    ops = CpuKernels(isa)

    def forward(first: int, last: int) -> Tensor:
        part = slice(first, last)
        return ops.make_experts(gate_up[part].clone(), down[part].clone(), first, own=True).forward(x, ids, weights)

    close(forward(0, 2) + forward(2, 3) + forward(3, 7), forward(0, 7))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_token_passes_its_experts_alike_alone_and_among_others(
    isa: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    hidden, inner, experts, top_k = sizes
    ops = DeterministicCpuKernels(isa)
    made = ops.make_experts(*weights_of(hidden, inner, experts, dtype), 0, own=True)
    x, (ids, weights) = random(130, hidden, dtype=dtype), choices(130, experts, top_k)
    whole = made.forward(x, ids, weights)
    for count in (1, 2, 17, 64):
        rows = slice(40, 40 + count)
        assert made.forward(x[rows].contiguous(), ids[rows], weights[rows]).equal(whole[rows]), f"{count} tokens"


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4, 64, 32), (3, 24, 12)], ids=str)
@pytest.mark.parametrize("rows", [1, 50])
def test_batched_products_give_what_torch_gives(
    isa: str, dtype: torch.dtype, sizes: tuple[int, int, int], rows: int
) -> None:
    parts, out_size, in_size = sizes
    weight = random(parts, out_size, in_size, dtype=dtype, seed=1)
    x = random(rows, parts, in_size + 5, dtype=dtype)[..., 2:-3]
    layer = CpuKernels(isa).make_batched_linear(weight, own=False)
    expected = torch.einsum("rpi,poi->rpo", x.double(), weight.double()).to(dtype)
    close(layer.forward(x), expected)
    room = torch.zeros(rows, parts, out_size + 3, dtype=dtype)
    close(layer.forward(x, room[..., 1:-2]), expected)
    close(room[..., 1:-2], expected)
    assert not room[..., 0].any()
    assert not room[..., -2:].any()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_placed_and_attended_to_as_by_torch(isa: str, dtype: torch.dtype) -> None:
    heads, nope, rope, rank, block_size = 3, 20, 32, 48, 16
    plan = [(20, 33), (1, 70), (1, 1)]
    batch = AttentionBatch.from_lists(
        [q for q, _ in plan], [kv for _, kv in plan], [[0, 1, 2], [3, 4, 5, 6, 7], [8]], block_size
    )
    num_tokens = batch.num_tokens
    query, latent = random(num_tokens, heads, nope + rope, dtype=dtype), random(num_tokens, rank + rope, dtype=dtype)
    angles = random(num_tokens, rope // 2, dtype=torch.float32, seed=3).repeat(1, 2)
    cos, sin, norm = angles.cos().to(dtype), angles.sin().to(dtype), random(rank, dtype=dtype, seed=4)
    pools = [random(9, 2, 1, 1, block_size, rank + rope, dtype=dtype, seed=5) for _ in range(2)]
    for is_interleaved in (True, False):
        placed = [
            ops.rotate_and_write_latent(
                query, latent, cos, sin, pool, 1, batch.slots, norm=norm, eps=1e-6, is_interleaved=is_interleaved
            )
            for ops, pool in zip((CpuKernels(isa), TorchKernels), pools, strict=True)
        ]
        close(placed[0], placed[1])
        close(pools[0], pools[1])
        wide = random(num_tokens, heads, rank + rope, dtype=dtype, seed=6)
        found, expected = (
            ops.paged_attention(wide, pools[1], 1, batch, scale=0.1, window=None)
            for ops in (CpuKernels(isa), TorchKernels)
        )
        close(found, expected)
