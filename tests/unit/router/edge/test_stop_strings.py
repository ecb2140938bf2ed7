"""Stop strings: the text that comes out does not depend on how it went in."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.router.edge.text.stop_strings import StopStrings
from tests.examples import examples

# Two letters make stop strings that repeat themselves, which is where a matcher goes wrong.
TEXTS = st.text(alphabet="ab", max_size=32)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 32), max_size=8)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule read off its definition: shortest prefix that ends with a stop string, the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in pairwise(places)]


@given(TEXTS, STOPS, CUTS)
@examples(200)
def test_any_split_gives_the_text_of_the_oracle(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    emitted, matched = "", None
    for piece in pieces_of(text, cuts):
        certain, matched = matcher.push(piece)
        emitted += certain
        if matched is not None:
            break
    else:
        emitted += matcher.flush()
    assert (emitted, matched) == oracle(text, stops)


@given(TEXTS, STOPS, CUTS)
@examples(200)
def test_exactly_the_longest_beginning_of_a_stop_string_is_held_back(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopStrings(stops)
    emitted, taken = "", ""
    for piece in pieces_of(text, cuts):
        certain, matched = matcher.push(piece)
        if matched is not None:
            return
        emitted += certain
        taken += piece
        begun = [n for stop in stops for n in range(len(stop)) if taken.endswith(stop[:n])]
        assert emitted == taken[: len(taken) - max(begun)]


def test_a_match_may_begin_inside_a_failed_one() -> None:
    assert StopStrings(["aabaaaa"]).push("aabaaabaaaa") == ("aaba", "aabaaaa")


def test_a_stop_string_completed_too_early_is_text_and_stays_text() -> None:
    matcher = StopStrings(["abc", "b"])
    assert matcher.push("ab", may_stop=False) == ("", None)  # "ab" may become "abc"
    assert matcher.push("x") == ("abx", None)


def test_one_that_begins_early_and_ends_late_enough_counts() -> None:
    matcher = StopStrings(["aa"])
    assert matcher.push("aa", may_stop=False) == ("a", None)
    assert matcher.push("ab") == ("", "aa")


def test_text_behind_a_match_in_the_same_piece_is_dropped() -> None:
    assert StopStrings(["\n\n"]).push("end.\n\nNext") == ("end.", "\n\n")
