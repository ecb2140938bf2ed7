"""What a trial's verdict is made of."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loadtest.chaos.memory import slope
from loadtest.chaos.report import summary
from loadtest.chaos.streams import Stream, prompts
from loadtest.chaos.trial import CONTROL, PHASES, VICTIMS, Outcome, Trial, judge, trials

TRIAL = Trial("decode", "SIGKILL", "decoding")
TOKENS = [7, 8, 9, 10]


def stream(tokens: list[int], times: list[float], error: str = "") -> Stream:
    return Stream([1], tokens, started_at=100.0, times=times, error=error)


CALM = stream(TOKENS, [101.0, 101.1, 101.2, 101.3])


def verdict(*streams: Stream, leaked: int = 0) -> tuple[int, int, int, float]:
    outcome = judge(TRIAL, streams, [CALM] * len(streams), leaked, "")
    return outcome.lost, outcome.wrong, outcome.leaked, pytest.approx(outcome.longest_pause_s)


def test_a_pause_is_no_loss() -> None:
    assert verdict(CALM, stream(TOKENS, [101.0, 101.1, 103.1, 103.2])) == (0, 0, 0, 2.0)


def test_a_first_token_counts_by_what_it_came_later() -> None:
    assert verdict(stream(TOKENS, [104.5, 104.6, 104.7, 104.8])) == (0, 0, 0, 3.5)


def test_an_error_an_answer_cut_short_and_an_endless_one_are_lost() -> None:
    cut = stream(TOKENS[:2], [101.0, 101.1])
    failed = stream(TOKENS[:3], [101.0, 101.1, 101.2], error="UNAVAILABLE: gone")
    longer = stream([*TOKENS, 11], CALM.times)
    assert verdict(cut, failed, CALM)[:2] == (2, 0)
    assert verdict(longer)[:2] == (1, 1)


def test_one_other_token_is_wrong_also_in_an_answer_that_was_lost() -> None:
    assert verdict(stream([7, 8, 9, 11], CALM.times), stream([6], [101.0], error="cut"))[:2] == (1, 2)


def test_a_line_has_the_form_that_scripts_read() -> None:
    assert str(Outcome(TRIAL, 1, 2, 3, 0.456)) == "decode SIGKILL decoding: 1|2|3|0.46 s"
    assert str(Outcome(TRIAL, 0, 0, 0, 1.0, "late")).startswith("decode SIGKILL decoding: 0|0|0|1.00 s")


def test_engines_hang_in_workers_alone_and_no_victim_comes_twice_in_a_row() -> None:
    every = trials()
    assert every[0] == CONTROL
    assert len(every) == 1 + (4 * len(VICTIMS) + 2) * len(PHASES)
    assert {trial.victim for trial in every if trial.fault == "hung-engine"} == {"prefill", "decode"}
    assert all(a.victim != b.victim for a, b in pairwise(every))


def test_trials_are_chosen_by_words() -> None:
    assert trials("decode SIGKILL decoding") == [TRIAL]
    assert {(trial.victim, trial.fault) for trial in trials("redis drain, store SIGKILL")} == {
        ("redis", "drain"), ("store", "SIGKILL"),
    }  # fmt: skip
    assert trials("decoder") == []


def test_the_table_shows_what_was_more_than_a_pause() -> None:
    text = summary([Outcome(TRIAL, 0, 0, 0, 1.0), Outcome(Trial("router", "SIGKILL", "queued"), 24, 0, 0, 2.0, "gone")])
    assert "0 / 0 / 0 / 1.0 s |" in text
    assert "**24 / 0 / 0 / 2.0 s**" in text
    assert "1 of 2 trials" in text
    assert "- router SIGKILL queued: gone" in text


def test_prompts_share_no_block() -> None:
    first_blocks = {tuple(prompt[:16]) for prompt in prompts(24)}
    assert len(first_blocks) == 24


def test_growth_is_measured_within_lives_and_not_between_them() -> None:
    assert slope([[(10.0, 100), (20.0, 200)], [(10.0, 900), (20.0, 1000)]]) == pytest.approx(10.0)
    assert slope([[(10.0, 100)]]) is None
