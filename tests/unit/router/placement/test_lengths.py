"""How long answers are, by those that have ended and those that run."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.lengths import BOUNDS, FIRST_GUESS, FORGETTING, AnswerLife, Lengths, begin_of, stage_of

ANSWERS = st.lists(st.integers(1, 5000), min_size=1, max_size=round(1 / FORGETTING))


@given(st.integers(1, BOUNDS[-1]))
def test_each_length_lies_in_one_stage(num_tokens):
    stage = stage_of(num_tokens)
    assert begin_of(stage) < num_tokens <= BOUNDS[stage]
    assert all(one < other for one, other in pairwise(BOUNDS))


@given(ANSWERS)
def test_of_answers_that_have_all_ended_the_mean_is_theirs(lengths):
    table = Lengths()
    for length in lengths:
        AnswerLife(table).ended(length)
    assert table.mean == pytest.approx(fmean(lengths), rel=1e-6)
    for bound in BOUNDS[:50]:
        assert table.share_longer(bound) == pytest.approx(fmean(length > bound for length in lengths), abs=1e-9)


@given(ANSWERS, st.lists(st.integers(1, 5000), max_size=50))
def test_how_often_a_running_answer_is_counted_changes_nothing(ended, running):
    often, seldom = Lengths(), Lengths()
    for length in ended:
        AnswerLife(often).ended(length)
        AnswerLife(seldom).ended(length)
    for length in running:
        one, other = AnswerLife(often), AnswerLife(seldom)
        for num_tokens in range(1, length + 1, 7):
            one.at(num_tokens)
        one.at(length)
        other.at(length)
    assert often.mean == pytest.approx(seldom.mean)


@given(ANSWERS, st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=50))
def test_longer_answers_never_make_the_share_of_long_ones_rise_with_the_length(ended, running):
    table = Lengths()
    for length in ended:
        AnswerLife(table).ended(length)
    for length, _ in running:
        AnswerLife(table).at(length)
    shares = [table.share_longer(num_tokens) for num_tokens in range(0, 6000, 37)]
    assert shares[0] == 1.0
    assert all(0.0 <= less <= more + 1e-9 for more, less in pairwise(shares))
    assert table.mean > 0


@given(ANSWERS)
def test_an_answer_that_left_is_not_counted_as_one_that_runs(lengths):
    table, other = Lengths(), Lengths()
    for length in lengths:
        AnswerLife(table).ended(length)
        AnswerLife(other).ended(length)
    never_begun = AnswerLife(table)
    never_begun.left()
    gone = AnswerLife(table)
    gone.at(1)
    gone.left()
    assert table.mean == other.mean


@pytest.mark.parametrize("mean", [64, 300, 1024])
def test_the_mean_is_known_while_the_long_ones_still_run(mean):
    """All answers of a steady stream begin at once after a start. By the mean of those that have ended the answer is
    half as long."""
    rng = random.Random(mean)
    table, running, ended, found = Lengths(), [], [], 0.0
    for second in range(2000):
        running.append((AnswerLife(table), second, round(mean * rng.lognormvariate(0.0, 0.4))))
        for answer in list(running):
            progress, begun, length = answer
            so_far = (second - begun) * mean // 200
            if so_far >= length:
                progress.ended(length)
                ended.append(length)
                running.remove(answer)
            else:
                progress.at(so_far)
        if second == 200:  # the mean answer's life
            found = table.mean
            assert fmean(ended) < 0.75 * mean
    assert found == pytest.approx(1.08 * mean, rel=0.3)
    assert table.mean == pytest.approx(1.08 * mean, rel=0.2)


def test_a_mix_of_other_answers_is_known_before_they_end():
    table = Lengths()
    for _ in range(1000):
        AnswerLife(table).ended(50)
    assert table.mean == pytest.approx(50, rel=0.01)
    for _ in range(300):
        AnswerLife(table).at(400)
    assert table.mean > 400
    for _ in range(500):
        AnswerLife(table).ended(50)
    assert table.mean == pytest.approx(50, rel=0.1)


def test_before_any_answer_a_guess_stands_for_all():
    assert Lengths().mean == FIRST_GUESS
    table = Lengths()
    AnswerLife(table).at(1)
    assert table.mean == FIRST_GUESS
