"""What every implementation of `Collectives` gives."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.interface import Collectives
from tests.unit.collectives.conftest import RunRanks
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

SIZES = (1, 15, 17, 4096, 70_000, 200_001)
"""Numbers: below a vector, in one message, in shares, in several messages."""


def part(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_taken_in_the_ranks_order_in_fp32(run_ranks: RunRanks[Any], size: int, dtype: torch.dtype) -> None:
    def work(group: Collectives) -> list[Tensor]:
        sums = [part(group.rank, count, dtype) for count in SIZES]
        for x in sums:
            group.all_reduce(x)
        return sums

    results = run_ranks(size, work)
    for count, *sums in zip(SIZES, *results, strict=True):
        expected = part(0, count, dtype).float()
        for rank in range(1, size):
            expected = expected + part(rank, count, dtype).float()
        for found in sums:
            assert torch.equal(found, expected.to(dtype)), count


@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_gathers_all_parts_and_the_others_none(run_ranks: RunRanks[Any], size: int) -> None:
    shape = (3, 40_000)

    def work(group: Collectives) -> Tensor | None:
        return group.gather(part(group.rank, 120_000, torch.float32).view(shape))

    first, *others = run_ranks(size, work)
    assert torch.equal(first, torch.stack([part(rank, 120_000, torch.float32).view(shape) for rank in range(size)]))
    assert others == [None] * (size - 1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_is_scattered_its_own_part(run_ranks: RunRanks[Any], size: int) -> None:
    shapes = [(3, 40_000), (1,), (7, 30_011)]

    def work(group: Collectives) -> list[Tensor]:
        found = []
        for shape in shapes:
            parts = torch.arange(size * prod(shape), dtype=torch.int64).view(size, *shape)
            out = torch.zeros(shape, dtype=torch.int64)
            group.scatter(parts if group.rank == 0 else None, out)
            found.append(out)
        return found

    for rank, found in enumerate(run_ranks(size, work)):
        for shape, out in zip(shapes, found, strict=True):
            assert torch.equal(out, torch.arange(size * prod(shape)).view(size, *shape)[rank]), (rank, shape)


@pytest.mark.parametrize("length", [0, 1, 700_000])
def test_messages_arrive_whole_and_in_order(run_ranks: RunRanks[Any], length: int) -> None:
    messages = [bytes([number]) * length for number in range(3)]

    def work(group: Collectives) -> list[bytes]:
        return [broadcast_bytes(group, message if group.rank == 0 else None) for message in messages]

    assert run_ranks(3, work) == [messages] * 3


def test_calls_of_all_kinds_may_follow_each_other(run_ranks: RunRanks[Any]) -> None:
    def work(group: Collectives) -> list[float]:
        found = []
        for step in range(200):
            x = torch.full((8,), float(group.rank + step))
            group.broadcast(x)
            found.append(float(x[0]))
            x += group.rank
            gathered = group.gather(x)
            found.append(0.0 if gathered is None else float(gathered[2, 0]))
            group.all_reduce(x)
            found.append(float(x[7]))
            group.scatter(torch.arange(3.0).view(3, 1) + step if group.rank == 0 else None, x[:1])
            found.append(float(x[0]))
        return found

    results = run_ranks(3, work)
    for rank, found in enumerate(results):
        expected = [
            [float(step), step + 2.0 if rank == 0 else 0.0, 3.0 * step + 3, float(step + rank)] for step in range(200)
        ]
        assert found == [value for row in expected for value in row]


def test_a_rank_may_leave_once_its_own_calls_are_done(run_ranks: RunRanks[Tensor]) -> None:
    """The first to be done leaves while the others still read its last message, which is longer than one piece."""

    def work(group: Collectives) -> Tensor:
        x = torch.full((300_000,), float(group.rank))
        group.all_reduce(x)
        group.broadcast(x)
        return x

    for _ in range(5):
        assert all(x.eq(3).all() for x in run_ranks(3, work))
