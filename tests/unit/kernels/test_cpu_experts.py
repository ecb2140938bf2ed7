"""The C++ kernels for experts, their choice and latents: what the references give, each row by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.kernels.backends.cpu import CpuKernels, DeterministicCpuKernels
from shared.kernels.batch import AttentionBatch
from shared.kernels.experts import routing as reference
from shared.kernels.experts.routing_rules import Routing
from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import ExpertParts, StepExpertLoras
from shared.kernels.pool_view import PoolView
from shared.kernels.torch_backend import TorchKernels

from .cpu_case import DTYPES, close, random
from .isas import every_isa, needs_library
from .routing_case import FAMILIES, ROUTINGS

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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_experts_add_what_torch_adds(isa: str, dtype: torch.dtype, sizes: tuple[int, ...], tokens: int) -> None:
    """Three adapters, of which one leaves these experts alone, and tokens of none."""
    hidden, inner, experts, top_k = sizes
    gate_up, down = weights_of(hidden, inner, experts, dtype)
    x, (ids, weights) = random(tokens, hidden, dtype=dtype), choices(tokens, experts, top_k)

    def part(rank: int, begin: int, out_size: int, in_size: int, seed: int) -> LoraPart:
        a = random(rank, in_size, dtype=torch.float32, seed=seed) / in_size**0.5
        return LoraPart(a, random(out_size, rank, dtype=torch.float32, seed=seed + 1) / rank**0.5, 0.7, begin)

    of_each = [
        {
            expert: ExpertParts(
                (part(5, 0, inner, hidden, 10), part(17, inner, inner, hidden, 20)), (part(3, 0, hidden, inner, 30),)
            )
            for expert in range(0, experts, 2)
        },
        {},
        {expert: ExpertParts((part(2, inner, inner, hidden, 40),)) for expert in range(experts)},
    ]
    rows = LoraRows.of([(2 * token) % 5 - 1 if token % 3 else 2 for token in range(tokens)], 4)
    found = []
    for ops in (TorchKernels, CpuKernels(isa)):
        made = ops.make_experts(gate_up, down, 0, own=False)
        loras = [made.make_loras(parts, x) if parts else None for parts in of_each]
        found.append(made.forward(x, ids, weights, StepExpertLoras([*loras, None], rows)))
        assert not torch.equal(found[-1], made.forward(x, ids, weights))
    close(found[1], found[0])


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
                query,
                latent,
                cos,
                sin,
                PoolView.over(pool),
                1,
                batch.slots,
                norm=norm,
                eps=1e-6,
                is_interleaved=is_interleaved,
            )
            for ops, pool in zip((CpuKernels(isa), TorchKernels), pools, strict=True)
        ]
        close(placed[0], placed[1])
        close(pools[0], pools[1])
        wide = random(num_tokens, heads, rank + rope, dtype=dtype, seed=6)
        found, expected = (
            ops.paged_attention(wide, PoolView.over(pools[1]), 1, batch, scale=0.1, window=None)
            for ops in (CpuKernels(isa), TorchKernels)
        )
        close(found, expected)


ALL = ROUTINGS | FAMILIES
SHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: x.round(),
    torch.zeros_like,
    lambda x: 60.0 * x,
    lambda x: torch.where(x > 0, 0.0, -0.0),
)
"""What random logits are made: as they are, with ties, all equal, far apart, zeros of both signs."""


def bias_of(routing: Routing) -> Tensor | None:
    """Multiples of 1/64, so that equal merits are equal sums."""
    return torch.arange(routing.num_experts).mul(37).remainder(17).sub(8) / 64 if routing.has_bias else None


def logits_of(routing: Routing, dtype: torch.dtype) -> Tensor:
    """30 tokens of each shape."""
    drawn = 2 * random(30, routing.num_experts, dtype=torch.float32)
    return torch.cat([shape(drawn) for shape in SHAPES]).to(dtype)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_choices_are_those_of_the_reference(isa: str, dtype: torch.dtype, name: str) -> None:
    routing = ALL[name]
    logits, bias = logits_of(routing, dtype), bias_of(routing)
    expected = reference.choose_experts(logits, bias, routing)
    for ops in (CpuKernels(isa), DeterministicCpuKernels(isa)):
        found = ops.choose_experts(logits, bias, routing)
        assert found[0].tolist() == expected[0].tolist()
        # Below 1e-37 torch's numbers have fewer digits, and ours are zero.
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-36)


@every_isa
@pytest.mark.parametrize("name", ALL)
def test_a_token_chooses_alike_alone_and_among_others(isa: str, name: str) -> None:
    routing, ops = ALL[name], CpuKernels(isa)
    logits, bias = logits_of(routing, torch.bfloat16), bias_of(routing)
    ids, weights = ops.choose_experts(logits, bias, routing)
    for first, last in ((0, 0), (7, 8), (15, 33), (149, 150)):
        found = ops.choose_experts(logits[first:last], bias, routing)
        assert found[0].equal(ids[first:last])
        assert found[1].equal(weights[first:last])


@every_isa
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
def test_a_broken_token_chooses_experts_and_breaks_no_other(isa: str, name: str, broken: float) -> None:
    routing = ALL[name]
    logits, bias = logits_of(routing, torch.float32), bias_of(routing)
    logits[3, -1] = broken
    logits[5] = broken
    expected = reference.choose_experts(logits, bias, routing)
    found = CpuKernels(isa).choose_experts(logits, bias, routing)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-36, equal_nan=True)
    for row, (its, others) in enumerate(zip(found[0].tolist(), expected[0].tolist(), strict=True)):
        assert len(set(its)) == routing.top_k
        assert set(its) <= set(range(routing.num_experts))
        assert its == others or row in (3, 5)
