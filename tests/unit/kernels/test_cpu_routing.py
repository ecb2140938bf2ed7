"""How the C++ kernels choose experts, on every instruction set: as the reference does, each token by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.kernels.backends.cpu import CpuKernels, DeterministicCpuKernels
from shared.kernels.experts import routing as reference
from shared.kernels.experts.rules import Routing

from .cpu_case import DTYPES, random
from .isas import every_isa, needs_library
from .routing_case import FAMILIES, ROUTINGS

pytestmark = needs_library

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
