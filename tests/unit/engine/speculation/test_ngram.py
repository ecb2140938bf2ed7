"""Guesses from an answer's own text."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.speculation.ngram import ORDERS, NgramDrafter
from tests.unit.engine.builders import sequence

SHORT = min(ORDERS)
TEXT = list(range(100, 160))


def test_a_copied_text_is_guessed_as_it_goes_on():
    drafter, item = NgramDrafter(), sequence("a", [*TEXT, 7, 8, 9, *TEXT[:SHORT]], max_tokens=99)
    assert drafter.propose(item, 5).token_ids == tuple(TEXT[SHORT : SHORT + len(drafter.propose(item, 5).token_ids)])
    for token in TEXT[SHORT:50]:
        item.token_ids.append(token)
    draft = drafter.propose(item, 8)
    assert draft.token_ids == tuple(TEXT[50:58])
    assert list(draft.chances) == sorted(draft.chances, reverse=True)
    assert draft.chances[-1] > 0.5


def test_an_answer_that_repeats_itself_is_guessed_round_by_round():
    drafter, item = NgramDrafter(), sequence("a", [1, *[5, 6, 7] * 12], max_tokens=99)
    assert drafter.propose(item, 7).token_ids == (5, 6, 7, 5, 6, 7, 5)


def test_without_a_repetition_nothing_is_guessed():
    drafter, item = NgramDrafter(), sequence("a", TEXT, max_tokens=99)
    assert drafter.propose(item, 8).token_ids == ()
    item.token_ids += [1, 2, 3]
    assert drafter.propose(item, 8).token_ids == ()


def test_chances_follow_what_came_although_nothing_was_computed_for_guesses():
    """Places that recur and go on otherwise each time."""
    drafter, item, choose = NgramDrafter(), sequence("a", [9] * 4, max_tokens=4000), Random(0)
    drafter.propose(item, 8)
    first = None
    for _ in range(200):
        item.token_ids += [11, 12, 13]
        draft = drafter.propose(item, 8)
        first = first or (draft.chances[0] if draft.token_ids else None)
        item.token_ids.append(choose.randrange(100, 1000))
        drafter.propose(item, 8)
    item.token_ids += [11, 12, 13]
    assert first is not None
    found = drafter.propose(item, 8)
    assert not found.chances or found.chances[0] < first / 2


def test_an_id_that_is_given_anew_is_another_text():
    drafter = NgramDrafter()
    drafter.propose(sequence("a", [*TEXT, *TEXT[:9]], max_tokens=99), 4)
    assert drafter.propose(sequence("a", [3, 4, 5], max_tokens=99), 4).token_ids == ()
    drafter.forget("a")
    drafter.forget("a")


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=150),
    st.integers(1, 150),
    st.lists(st.integers(0, 3), max_size=200),
)
def test_a_guess_is_what_followed_an_earlier_place_with_the_same_end(prompt, step, rest):
    drafter, item = NgramDrafter(), sequence("a", prompt, max_tokens=400)
    while True:
        tokens = item.token_ids
        draft = drafter.propose(item, 12)
        assert len(draft.token_ids) == len(draft.chances) <= 12
        if draft.token_ids:
            ends = [at for at in range(SHORT, len(tokens)) if tokens[at - SHORT : at] == tokens[-SHORT:]]
            assert any(continued(tokens, at, len(draft.token_ids)) == list(draft.token_ids) for at in ends)
        if not rest:
            break
        item.token_ids += rest[:step]
        del rest[:step]


@given(st.lists(st.integers(0, 40), min_size=66, max_size=150), st.lists(st.integers(65, 2000), max_size=4), st.data())
def test_behind_rests_a_text_is_known_as_one_that_came_at_once(prompt, steps, data):
    rests, at_once, item = NgramDrafter(), NgramDrafter(), sequence("a", prompt, max_tokens=9000)
    rests.propose(item, 12)
    random = data.draw(st.randoms(use_true_random=False))
    for step in steps:
        item.token_ids += [random.randrange(40) for _ in range(step)]
        rests.propose(item, 12)
    whole = sequence("b", item.token_ids, max_tokens=9000)
    assert rests.propose(item, 12).token_ids == at_once.propose(whole, 12).token_ids


def continued(tokens: list[int], at: int, count: int) -> list[int]:
    found = list(tokens)
    for place in range(at, at + count):
        found.append(found[place])
    return found[len(tokens) :]
