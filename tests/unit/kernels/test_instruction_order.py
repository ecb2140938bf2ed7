"""Reading the order of products, waits and softmax off short pieces of code."""

from __future__ import annotations

import pytest

from .instruction_order import Loop, overlaps, product_loops

SCORES = "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0;\n"
VALUES = "\twgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r2}, {%r3}, %rd3, 1;\n"
SOFTMAX = "\tex2.approx.ftz.f32 %f1, %f2;\n\tex2.approx.ftz.f32 %f3, %f4;\n"
DONE = "\twgmma.wait_group.sync.aligned 0;\n"
ALL_BUT_ONE = "\twgmma.wait_group.sync.aligned 1;\n"
AGAIN = "\t@%p1 bra \t$L__BB0_1;\n"
END = "\tret;\n"


def loops_of(*body: str) -> list[Loop]:
    return product_loops("$L__BB0_1:\n" + "".join(body) + AGAIN + END)


def test_softmax_between_the_next_scores_and_its_values_overlaps() -> None:
    (loop,) = loops_of(SCORES, SOFTMAX, VALUES, DONE)
    assert loop.letters() == "PEEPW"
    assert (loop.exposed(), loop.waits_between_products_and_softmax()) == (0, 0)
    assert overlaps([loop])


@pytest.mark.parametrize(
    ("body", "exposed"),
    [
        ((SCORES, DONE, SOFTMAX, VALUES, DONE), 2),
        ((SCORES, DONE, SOFTMAX, VALUES), 2),  # the values fly no further than to the next wait
        ((SCORES, ALL_BUT_ONE, SOFTMAX, VALUES), 0),  # beside the values before; but the scores are waited for
        ((SCORES, "\tex2.approx.ftz.f32 %f1, %f2;\n", DONE, "\tex2.approx.ftz.f32 %f3, %f4;\n", VALUES, DONE), 1),
    ],
)
def test_a_wait_between_scores_and_softmax_is_found(body: tuple[str, ...], exposed: int) -> None:
    loops = loops_of(*body)
    assert [loop.exposed() for loop in loops] == [exposed]
    assert [loop.waits_between_products_and_softmax() for loop in loops] == [1]
    assert not overlaps(loops)


def test_a_turn_is_read_in_the_order_in_which_it_runs() -> None:
    """Entered in its middle by a jump, and with a barrier's own loop and a rare branch in it."""
    code = (
        "\tbra.uni \t$L__BB0_3;\n"
        f"$L__BB0_2:\n{SOFTMAX}{VALUES}{DONE}\t@%p2 bra \t$L__BB0_5;\n"
        f"$L__BB0_3:\n$L__BB0_4:\n\t@!%p4 bra \t$L__BB0_4;\n{SCORES}\t@%p3 bra \t$L__BB0_2;\n"
        f"\tadd.s32 %r5, %r5, 1;\n\tbra.uni \t$L__BB0_2;\n$L__BB0_5:\n{END}"
    )
    assert [loop.letters() for loop in product_loops(code)] == ["PEEPW"]


def test_machine_code_is_read_too() -> None:
    code = (
        ".L_x_1:\n        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], !UPT ;\n"
        "        /*0020*/                   MUFU.EX2 R5, R5 ;\n"
        "        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
        "        /*0040*/               @P0 BRA `(.L_x_1) ;\n        /*0050*/                   EXIT ;\n"
    )
    (loop,) = product_loops(code)
    assert loop.letters() == "PEW"
    assert overlaps([loop])


def test_each_innermost_loop_counts_and_code_without_one_does_not_overlap() -> None:
    body = f"{SCORES}{SOFTMAX}{VALUES}{DONE}"
    waiting = f"{SCORES}{DONE}{SOFTMAX}{VALUES}{DONE}"
    code = (
        f"$L__BB0_1:\n$L__BB0_2:\n{body}\t@%p1 bra $L__BB0_2;\n$L__BB0_3:\n{waiting}\t@%p2 bra $L__BB0_3;\n"
        f"\t@%p3 bra $L__BB0_1;\n{END}"
    )
    loops = product_loops(code)
    assert [loop.letters() for loop in loops] == ["PEEPW", "PWEEPW"]
    assert not overlaps(loops)
    assert not overlaps(product_loops(body + END))
