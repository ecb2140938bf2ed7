"""Markdown tables: one form for all benchmarks."""

from __future__ import annotations

import pytest

from loadtest.markdown import bold, table


def test_figures_are_aligned_right_and_names_left() -> None:
    assert table(("", "policy", "goodput"), [("1.0", "tandem", "2.5"), ("", "", "")], left=(1,)) == (
        "| | policy | goodput |\n| ---: | --- | ---: |\n| 1.0 | tandem | 2.5 |\n| | | |"
    )


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table(("a", "b"), [("x",)])


def test_only_the_best_is_bold() -> None:
    assert (bold("1"), bold("1", False)) == ("**1**", "1")
