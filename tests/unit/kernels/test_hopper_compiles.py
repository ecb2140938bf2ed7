"""The Hopper prefill compiled ahead of time: its instructions, and that its softmax runs beside matrix products."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from . import compiling
from .compiling import TARGETS, Compiled
from .conftest import Run
from .instruction_order import EXPONENTIAL, PRODUCT, WAIT, Loop, overlaps, product_loops

pytestmark = pytest.mark.slow

TILE = 64  # keys of one step
CONSUMERS = 2

Loops = dict[str, list[Loop]]
"""By the kind of code, PTX and machine code."""


def loops_of(kernel: Compiled) -> Loops:
    return {"ptx": product_loops(kernel.code), "machine": product_loops(compiling.machine_code(kernel))}


def hopper_prefill(*shape: Any) -> tuple[Compiled, str, Loops]:
    kernel = compiling.compile_hopper_prefill(*shape)
    return kernel, compiling.products_and_exponentials(kernel), loops_of(kernel)


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window", "dtype", "hoisted"),
    [
        (128, 4, 16, None, torch.bfloat16, 0),
        (128, 8, 32, None, torch.bfloat16, 0),
        (128, 7, 64, None, torch.bfloat16, 0),
        (128, 1, 16, None, torch.float16, 0),
        (128, 16, 64, 1000, torch.float16, 0),
        (128, 4, 16, 1000, torch.bfloat16, 0),
        (64, 4, 16, None, torch.bfloat16, 0),
        (64, 1, 32, 1000, torch.bfloat16, 6),
        (64, 8, 64, None, torch.float16, 0),
    ],
)
def test_the_hopper_prefill_overlaps_softmax_with_products_and_spills_nothing(
    compiled: Run,
    head_dim: int,
    group: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    hoisted: int,  # exponentials that the assembler moves before the first product of their turn
) -> None:
    kernel, order, loops = compiled(hopper_prefill, head_dim, group, block_size, window, dtype)
    assert not kernel.spills
    assert kernel.shared_bytes <= TARGETS["sm_90"].shared_bytes
    assert "wgmma.mma_async" in kernel.code
    # Keys and values: for each block as many boxes as it has rows of 128 bytes, the widest that is swizzled.
    assert kernel.code.count("cp.async.bulk.tensor.2d") == 2 * TILE // block_size * head_dim // 64
    assert "setmaxnreg" in kernel.code
    scores, values = head_dim // 16, TILE // 16
    for code, found in loops.items():
        assert len(found) == CONSUMERS
        assert overlaps(found) or (code == "machine" and hoisted), [loop.letters() for loop in found]
        for loop in found:
            # The scores of the next keys, this tile's softmax, its values, and then the only wait, for both products.
            assert (loop.count(PRODUCT), loop.count(WAIT)) == (scores + values, 1)
            assert loop.count(EXPONENTIAL) >= 32  # 64 x 64 scores over 128 threads
            assert loop.letters().endswith("P" * values + "W")
            assert loop.exposed() <= hoisted
    for loop in loops["ptx"]:
        assert re.fullmatch("P" * scores + "E+" + "P" * values + "W", loop.letters())
    # Each consumer: the first scores, wait; the loop, wait; the last softmax and its values, wait.
    *parts, rest = order.split("W")
    assert rest == ""
    assert len(parts) == 3 * CONSUMERS
    for first, _, last in (parts[:3], parts[3:]):
        assert first == "P" * scores
        assert re.fullmatch("E+" + "P" * values, last)


def hopper_prefill_that_waits() -> Loops:
    """The same kernel with one more instruction: its softmax waits until the scores of the next keys are done."""
    import triton.experimental.gluon as gluon
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

    from shared.kernels.attention.hopper import jit

    overlapping = jit.hide_unseen

    @gluon.jit
    def hide_unseen(scores, query_positions, start, whole_end, SCORES, WINDOW):  # type: ignore[no-untyped-def]  # noqa: N803
        scores = warpgroup_mma_wait(0, deps=[scores])
        return overlapping(scores, query_positions, start, whole_end, SCORES, WINDOW)

    jit.hide_unseen = hide_unseen
    return loops_of(compiling.compile_hopper_prefill(128, 4, 16, None))


def test_a_hopper_prefill_that_waits_for_its_scores_is_told_from_one_that_does_not(compiled_afresh: Run) -> None:
    for found in compiled_afresh(hopper_prefill_that_waits).values():
        assert len(found) == CONSUMERS
        assert not overlaps(found)
        for loop in found:
            assert loop.waits_between_products_and_softmax() == 1
            assert loop.exposed() >= 32


def portable_prefill() -> list[Loops]:
    kernels = compiling.compile_attention(128, 4, 16, None, torch.bfloat16)
    return [loops_of(kernel) for kernel in kernels if kernel.name == "prefill_tiles"]


def test_the_portable_prefill_waits_for_its_scores(compiled: Run) -> None:
    kernels = compiled(portable_prefill)
    assert len(kernels) == 2
    for loops in kernels:
        for found in loops.values():
            assert len(found) == 2  # tiles that every query sees, and the causal edge
            assert not any(overlaps([loop]) for loop in found)
