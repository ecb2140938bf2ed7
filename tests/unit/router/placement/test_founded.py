"""A worker that has run few kinds of steps takes the coefficients of one that has run more, at its own speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.founded import FEWEST_KINDS, MOST_COMPARED, FoundedTimes
from shared.sizing.step_time import StepKinds, StepTimes, StepWork
from tests.unit.router.placement.builders import view

QUICK = StepTimes(fixed_s=1e-3, read_s=4e-3, token_s=2e-5, sequence_s=1e-5, kv_s=1e-8, attention_s=1e-9)
SLOW = QUICK.scaled(3.0)
ABSURD = StepTimes(fixed_s=1e-3, read_s=4e-3, token_s=1e-3, sequence_s=1e-5, kv_s=1e-8, attention_s=1e-9)
"""As QUICK for a few answers; of prompts it knows nothing."""


ENOUGH = StepKinds(FEWEST_KINDS, FEWEST_KINDS)
DECODED = StepKinds(3, 0)
BOTH = StepKinds(3, 2)


def see(
    found: FoundedTimes,
    name: str,
    own: StepTimes | None,
    num_answers: int = 0,
    num_queued: int = 0,
    kinds: StepKinds = BOTH,
):
    """What the worker's steps are taken to last after a report of its answers, its queue, its own fit, and how many
    kinds of steps the fit rests on."""
    seen = view(
        name, num_decoding=num_answers, num_context_tokens=100 * num_answers,
        num_queued_tokens=num_queued, num_queued_pairs=50.0 * num_queued,
    )  # fmt: skip
    return found.times(seen, own, kinds)


def season(found: FoundedTimes, name: str, own: StepTimes) -> None:
    """The worker has run enough kinds of both."""
    assert see(found, name, own, kinds=ENOUGH) is own


def test_a_worker_that_has_only_decoded_knows_prompts_by_another_one():
    found = FoundedTimes()
    assert see(found, "new", ABSURD, 2) is ABSURD  # there is no better one yet
    season(found, "old", QUICK)
    taken = see(found, "new", ABSURD, 1)
    assert taken is not None
    assert taken.prompt_s(2000) == pytest.approx(QUICK.prompt_s(2000), rel=0.2)
    assert see(found, "new", None) is None


def test_a_worker_that_has_only_computed_prompts_knows_answers_by_another_one():
    found = FoundedTimes()
    season(found, "old", QUICK)
    absurd = replace(QUICK, sequence_s=1.0, kv_s=1e-3)
    prompts = StepKinds(0, 3)
    see(found, "new", absurd, 0, 500, prompts)
    taken = see(found, "new", absurd, 0, 200, prompts)  # a part of the queue was computed
    assert taken is not None
    assert taken.decode_step_s(4, 400) == pytest.approx(QUICK.decode_step_s(4, 400))


@pytest.mark.parametrize(("own", "nearest"), [(QUICK, "quick"), (SLOW, "slow")], ids=["quick", "slow"])
def test_cards_of_two_kinds_are_told_apart_by_what_they_do(own, nearest):
    found = FoundedTimes()
    season(found, "quick", QUICK)
    season(found, "slow", SLOW)
    assert see(found, nearest + " at answers", own, 3) == own
    see(found, nearest + " at a prompt", own, 0, 500)
    assert see(found, nearest + " at a prompt", own) == own


def test_one_of_an_earlier_release_which_does_not_say_is_believed_and_helps_no_other():
    found = FoundedTimes()
    assert see(found, "old", ABSURD, 1, kinds=StepKinds()) is ABSURD
    assert see(found, "new", QUICK, 1) is QUICK


def test_among_many_of_one_kind_the_one_of_another_kind_is_kept_to_compare_with():
    found = FoundedTimes()
    for number in range(2 * MOST_COMPARED):
        season(found, f"quick{number}", QUICK.scaled(1.0 + 0.01 * number))
    season(found, "slow", replace(SLOW, token_s=10 * SLOW.token_s))
    for number in range(2 * MOST_COMPARED):
        see(found, f"quick{number}", QUICK.scaled(1.0 + 0.01 * number), 4)
        season(found, f"more{number}", QUICK.scaled(1.0 + 0.01 * number))
    assert "slow" in found._founded
    assert len(found._founded) == MOST_COMPARED


def test_a_fit_without_time_is_not_divided_by():
    found = FoundedTimes()
    season(found, "broken", QUICK.scaled(0.0))
    assert see(found, "new", QUICK, 2) is not None


def test_a_prompt_that_was_not_computed_yet_says_nothing_of_prompts():
    found = FoundedTimes()
    season(found, "old", QUICK)
    see(found, "new", ABSURD, 1)
    assert see(found, "new", ABSURD, 1, 500).token_s == pytest.approx(QUICK.token_s, rel=0.2)


def test_a_prompt_that_was_cancelled_says_nothing_of_prompts():
    found = FoundedTimes()
    season(found, "old", QUICK)
    see(found, "new", ABSURD, 0, 500, DECODED)
    see(found, "new", ABSURD, 0, 0, DECODED)
    assert see(found, "new", ABSURD, 1, 0, DECODED).token_s == pytest.approx(QUICK.token_s, rel=0.2)


def test_a_router_that_has_just_started_believes_what_rests_on_enough():
    assert see(FoundedTimes(), "old", QUICK, kinds=ENOUGH) is QUICK


def test_its_own_speed_is_kept_where_no_such_card_is_known():
    found = FoundedTimes()
    season(found, "quick", QUICK)
    taken = see(found, "slow", SLOW, 4)
    assert taken is not None
    assert taken.prompt_s(1000) == pytest.approx(SLOW.prompt_s(1000))


def test_once_it_has_run_enough_kinds_its_own_fit_counts_and_helps_others():
    found = FoundedTimes()
    season(found, "old", QUICK)
    season(found, "new", SLOW)
    assert see(found, "new", SLOW, kinds=ENOUGH) is SLOW
    found.forget("new")
    assert see(found, "new", ABSURD, 1) is not ABSURD


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(0, 64), st.integers(0, 1 << 14), st.integers(1, 3), st.integers(0, 9)
        ),
        max_size=80,
    )
)
def test_at_what_it_does_the_worker_has_its_own_speed_and_few_are_kept(reports):
    found = FoundedTimes()
    for number in range(3):
        season(found, f"old{number}", QUICK.scaled(1.0 + number))
    for number, num_answers, num_queued, *kinds in reports:
        own = QUICK.scaled(1.0 + number % 3)
        taken = see(found, f"w{number}", own, num_answers, num_queued, StepKinds(*kinds))
        assert taken is not None
        if num_answers:
            work = StepWork(num_answers, 100 * num_answers)
            assert taken.step_s(work) == pytest.approx(own.step_s(work))
        assert len(found._founded) <= MOST_COMPARED
