"""Low-rank additions of a backend beside the reference's, and a row beside others beside that row alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.kernels.lora.parts import LoraPart
from shared.kernels.lora.reference import add_lora, make_plain_lora
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import PROJECTIONS, ExpertLoras, PackedAdapter

from .comparing import TOLERANCES, random_tensor, triton_kernels

if TYPE_CHECKING:
    from shared.kernels.lora.step import LoraOps

FUSED = ((0, 64), (64, 32), (96, 32))
"""(begin, outputs) of the parts of a projection of 128 outputs."""


def parts_of(
    seed: int,
    ranks: Sequence[int],
    in_size: int,
    dtype: torch.dtype,
    device: str,
    spans: Sequence[tuple[int, int]] = FUSED,
) -> list[LoraPart]:
    """A rank of 0: that part has no addition."""
    found = []
    for place, (rank, (begin, outputs)) in enumerate(zip(ranks, spans, strict=True)):
        if rank:
            a = random_tensor(rank, in_size, dtype=dtype, device=device, seed=10 * seed + place) / in_size**0.5
            b = random_tensor(outputs, rank, dtype=dtype, device=device, seed=10 * seed + place + 1) / rank**0.5
            found.append(LoraPart(a, b, 0.5 + seed, begin))
    return found


def check_loras(
    ops: LoraOps, num_rows: int, in_size: int, dtype: torch.dtype, device: str = "cpu", *, exact: bool = False
) -> None:
    """Additions of several ranks and targets, one that leaves the projection alone, and rows of none. `exact`: a
    row has the same bits alone."""
    x = random_tensor(num_rows, in_size, dtype=dtype, device=device)
    out = random_tensor(num_rows, 128, dtype=dtype, device=device, seed=5)
    ranks = [(8, 8, 8), (1, 0, 17), (0, 0, 0), (0, 40, 0), (256, 16, 3)]
    draw = random.Random(num_rows)
    of_rows = [draw.choice([-1, 0, 1, 2, 3, 4, 4]) for _ in range(num_rows)]
    rows = LoraRows.of(of_rows, len(ranks), device)
    parts = [parts_of(seed, of_each, in_size, dtype, device) for seed, of_each in enumerate(ranks)]
    made = [ops.make_lora(of_each, in_size, x) if of_each else None for of_each in parts]
    expected, found = out.clone(), out.clone()
    add_lora(expected, x, [make_plain_lora(of_each, in_size, x) if of_each else None for of_each in parts], rows)
    ops.add_lora(found, x, made, rows)
    tolerance = 4 * TOLERANCES[dtype]
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)
    untouched = [row for row, addition in enumerate(of_rows) if addition in (-1, 2)]
    assert torch.equal(found[untouched], out[untouched])
    assert not torch.equal(found, out) or num_rows == len(untouched)
    for row in range(num_rows) if exact else ():
        alone = out[row : row + 1].clone()
        ops.add_lora(alone, x[row : row + 1], made, LoraRows.of([of_rows[row]], len(ranks), device))
        assert torch.equal(alone[0], found[row]), f"row {row}"


def check_triton_loras(num_rows: int, in_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Of the process that Triton runs in."""
    check_loras(triton_kernels(), num_rows, in_size, dtype, device, exact=device == "cpu")


def check_slots(dtype: torch.dtype, device: str = "cpu") -> None:
    """Decode steps over slots that are filled, emptied and filled anew: what the same rows get by `add_lora`. Of the
    process that Triton runs in."""
    ops, in_size, num_layers, num_slots = triton_kernels(), 48, 2, 3
    like = torch.zeros(1, dtype=dtype, device=device)

    def adapter(seed: int, ranks: Sequence[int]) -> PackedAdapter:
        of_place = [parts_of(10 * seed + place, ranks, in_size, dtype, device) for place in range(4 * num_layers)]
        made = [ops.make_lora(parts, in_size, like) if place % 3 else None for place, parts in enumerate(of_place)]
        return PackedAdapter(tuple(made))

    adapters = {1: adapter(1, (8, 8, 8)), 2: adapter(2, (0, 40, 0)), 3: adapter(3, (16, 1, 3))}
    slots = ops.hold_loras(num_layers, num_slots, 40, 40, like)
    for slot, placed in adapters.items():
        assert slots.place(slot, placed)
    steps = {size: slots.step(size) for size in (4, 40)}  # as graphs keep them

    def check(of_rows: list[int], size: int, places: Sequence[int] = range(4 * num_layers)) -> None:
        slots.fill(of_rows, size, lambda count: torch.full((count,), 255, dtype=torch.uint8))
        padded = [*of_rows, *[0] * (size - len(of_rows))]
        rows = LoraRows.of([slot - 1 for slot in padded], num_slots, device)
        x = random_tensor(size, in_size, dtype=dtype, device=device, seed=size)
        before, is_changed = random_tensor(size, 128, dtype=dtype, device=device, seed=5), False
        for place in places:
            out, expected = before.clone(), before.clone()
            loras = [adapters[slot].loras[place] if slot in adapters else None for slot in (1, 2, 3)]
            ops.add_lora(expected, x, loras, rows)
            steps[size].add(out, x, place // 4, PROJECTIONS[place % 4])
            torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCES[dtype])
            is_changed |= not torch.equal(out, before)
        changed = [row for row, slot in enumerate(padded) if slot in adapters]
        assert is_changed or not changed

    check([1, 2, 3], 4)
    check([0, 0, 2, 0], 4, places=(0, 5))
    check([1] * 33 + [0, 3] * 3, 40, places=(4,))  # more rows than a tile has
    del adapters[2]
    assert not slots.place(2, None)
    check([1, 2, 3, 2], 4, places=(1, 6))
    adapters[2] = adapter(5, (3, 3, 0))
    assert slots.place(2, adapters[2])
    check([2, 2, 0, 1], 4, places=(1, 3))
    check([0], 4, places=(2,))
    assert not slots.place(1, PackedAdapter(adapters[1].loras, {0: ExpertLoras((), ())}))


def rows_of(additions: Sequence[int], count: int) -> tuple[Tensor, tuple[int, ...], list[tuple[int, int, int]]]:
    """Order, starts and tiles."""
    rows = LoraRows.of(additions, count)
    return rows.order, rows.starts, rows.tiles(2)
