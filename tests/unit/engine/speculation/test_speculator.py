"""How many guesses a step has."""

from __future__ import annotations

import math

import pytest

from shared.engine.plan import SampledToken
from shared.engine.sampling_params import DRAFTERS, MOST_GUESSES, Speculation
from shared.engine.speculation.drafter import Draft
from shared.engine.speculation.gain import ARM_STEPS, ARMS, LONGEST_STAY
from shared.engine.speculation.head_model import HeadGuess, HeadModel
from shared.engine.speculation.row_costs import OLD, RowCosts
from shared.engine.speculation.speculator import PLAIN_EVERY, Speculator
from shared.errors import InvalidRequest
from shared.kv.groups import KVGroups
from tests.unit.engine.builders import sequence


class Sure:
    """Guesses the same tokens again and again, each right with a chance that a sequence's id gives."""

    def __init__(self, method: str = "ngram") -> None:
        self.method = method
        self.asked: list[tuple[str, int]] = []

    def propose(self, item, most):
        self.asked.append((item.sequence_id, most))
        chance = float(item.sequence_id)
        return Draft((7,) * most, tuple(chance ** (place + 1) for place in range(most)))

    def forget(self, sequence_id):
        self.asked.append((sequence_id, 0))


def counts(speculator, *names, most_rows=64, plain_s=0.1, limit_s=math.inf, max_tokens=99, **sampling):
    items = [sequence(name, [2, 3], max_tokens=max_tokens, **sampling) for name in names]
    found = speculator.propose(items, most_rows, plain_s, limit_s)
    return [len(found.get(name, ())) for name in names]


def measured(speculator, num_sequences, *seconds):
    """Steps of these sequences with 0, 1, … guesses."""
    for _ in range(8):
        for num_guesses, step_s in enumerate(seconds):
            speculator.measured(num_sequences, num_guesses, 0.1, step_s)


def test_as_many_rows_as_bring_the_most_tokens_a_second():
    speculator = Speculator([Sure()])
    measured(speculator, 1, 0.1, 0.11, 0.112, *[0.6] * 13)
    # With chance 0.9: 1.9 tokens in 1.1, 2.71 in 1.12, 8.15 at most in 6.
    assert counts(speculator, "0.9") == [2]
    measured(speculator, 1, *(0.1 + 0.001 * rows for rows in range(16)))
    assert counts(speculator, "0.97") == [MOST_GUESSES]


@pytest.mark.parametrize(("chance", "cost"), [("0.05", 0.11), ("0.3", 0.14), ("0.9", 0.85)])
def test_where_a_row_costs_more_than_it_brings_there_is_none(chance, cost):
    speculator = Speculator([Sure()])
    measured(speculator, 1, 0.1, *(cost + 0.01 * rows for rows in range(15)))
    assert counts(speculator, chance) == [0]


def test_costs_are_those_beside_a_plain_step_as_it_is_measured_too():
    """Steps that are all predicted to be twice as fast as they are make no row look expensive."""
    speculator = Speculator([Sure()])
    measured(speculator, 1, *(0.2 + 0.002 * rows for rows in range(16)))
    assert counts(speculator, "0.9")[0] > 8


def test_the_likeliest_guesses_of_a_batch_come_first():
    speculator = Speculator([Sure()])
    measured(speculator, 4, *(0.1 + 0.004 * rows for rows in range(40)))
    found = counts(speculator, "0.95", "0.2", "0.6", "0.01")
    assert found[0] > found[2] > found[1] >= found[3] == 0


def test_no_step_becomes_longer_than_it_may():
    speculator = Speculator([Sure()])
    measured(speculator, 1, *(0.1 + 0.01 * rows for rows in range(16)))
    assert counts(speculator, "0.99", limit_s=0.1451) == [4]
    assert counts(speculator, "0.99", limit_s=0.05) == [0]
    assert counts(speculator, "0.99", most_rows=3) == [3]


def test_a_step_without_guesses_comes_now_and_then():
    speculator = Speculator([Sure()])
    found = [counts(speculator, "0.99")[0] > 0 for _ in range(2 * PLAIN_EVERY + 2)]
    assert found.count(False) == 2


def test_no_token_behind_the_answers_end_is_guessed():
    drafter = Sure()
    speculator = Speculator([drafter], num_guesses=MOST_GUESSES)
    assert counts(speculator, "1.0", max_tokens=4) == [3]
    assert counts(speculator, "1.0", max_tokens=1) == [0]
    assert counts(speculator, "1.0", speculation=Speculation("off")) == [0]
    assert counts(speculator, "1.0", speculation=Speculation("ngram", 2)) == [2]
    assert drafter.asked == [("1.0", 3), ("1.0", 2)]
    speculator.ended("1.0")
    assert drafter.asked[-1] == ("1.0", 0)


def test_the_drafter_that_expects_more_is_taken_and_counted():
    worse = Sure("worse")
    worse.propose = lambda item, most: Draft((9,), (0.5,))
    speculator = Speculator([worse, Sure("better")], num_guesses=2)
    item = sequence("0.9", [2, 3], max_tokens=9)
    assert speculator.propose([item], 64) == {"0.9": (7, 7)}
    speculator.verified("0.9", 2, 1)
    assert speculator.methods == {"worse", "better"}
    assert speculator.counters.num_guesses == {**dict.fromkeys(DRAFTERS, 0), "better": 2}
    assert speculator.counters.num_accepted == {**dict.fromkeys(DRAFTERS, 0), "better": 1}


def test_a_busy_moment_is_forgotten():
    costs = RowCosts()
    costs.measured(1, 4, 9.0)
    assert costs.factors(1, 4)[4] > 4
    for _ in range(2 * OLD):
        costs.measured(1, 0, 1.0)
    assert costs.factors(1, 4)[4] < 1.5


def answered(speculator, steps, guess_s, num_right=lambda guesses: guesses):
    """Guesses of each step of one sequence: a step takes 0.1 s, and `guess_s` more with guesses, whatever was known."""
    item, found = sequence("0.9", [2, 3], max_tokens=9999), []
    for _ in range(steps):
        guesses = len(speculator.propose([item], 64, 0.1).get("0.9", ()))
        found.append(guesses)
        speculator.measured(1, guesses, 0.1, 0.1 + (guess_s if guesses else 0.0))
        if guesses:
            speculator.verified("0.9", guesses, num_right(guesses))
    return found


class Free(RowCosts):
    """Costs that are never learned: rows are taken to cost nothing."""

    def factors(self, num_sequences, most):
        return [1.0] * (most + 1)


@pytest.mark.parametrize("gains", [True, False])
def test_guesses_that_are_expected_to_gain_and_lose_are_tried_ever_more_rarely(gains):
    speculator = Speculator([Sure()])
    speculator._costs = Free()
    # All right bring 16 tokens in 0.2 s; with one right of 15, 2 tokens take 0.3 s and 1 token takes 0.1 s.
    found = answered(speculator, 4000, *((0.1,) if gains else (0.2, lambda _: 1)))
    guessing = sum(map(bool, found[1000:])) / 3000
    trial = ARM_STEPS * len(ARMS)
    assert guessing > 1 - trial / LONGEST_STAY if gains else guessing < trial / LONGEST_STAY
    if not gains:
        assert sum(map(bool, found[:200])) >= trial / 2  # at first it is tried soon


def test_guesses_come_back_when_they_gain_again():
    speculator = Speculator([Sure()])
    speculator._costs = Free()
    answered(speculator, 500, 0.2, lambda _: 0)
    found = answered(speculator, 5 * LONGEST_STAY, 0.05)
    assert sum(map(bool, found[-50:])) >= 50 - 2 * ARM_STEPS - 1  # beside a trial, or the plain step now and then


def ahead(speculator, *names, in_flight=1, plain_s=0.1, **sampling):
    """Whether a step in flight is waited for, in which each sequence gets a token."""
    items = [sequence(name, [2, 3], max_tokens=99, **sampling) for name in names]
    for item in items:
        item.num_in_flight_samples = in_flight
    return speculator.awaits(items, 64, plain_s)


def test_a_step_in_flight_is_waited_for_where_guesses_behind_its_tokens_gain():
    speculator = Speculator([Sure()])
    measured(speculator, 1, *(0.1 + 0.002 * rows for rows in range(16)))
    assert ahead(speculator, "0.9")
    assert not ahead(speculator, "0.01")
    assert not ahead(speculator, "0.9", speculation=Speculation("off"))
    # The token in flight takes the place of the first guess.
    assert not ahead(speculator, "0.9", speculation=Speculation("ngram", 1))
    assert ahead(speculator, "0.9", speculation=Speculation("ngram", 1), in_flight=0)
    measured(speculator, 1, 0.1, *[0.9] * 15)  # what is waited for comes out in these times
    assert not ahead(speculator, "0.9")
    assert not ahead(Speculator([Sure()], num_guesses=3), "0.9", speculation=Speculation("off"))
    assert ahead(Speculator([Sure()], num_guesses=3), "0.01")


def answered_ahead(speculator, steps, guess_s, num_right):
    """Guesses of each step of one sequence whose steps are planned ahead where no guesses are waited for: one takes
    0.1 s, and `guess_s` more with guesses."""
    item, found, in_flight, has_waited = sequence("0.9", [2, 3], max_tokens=9999), [], [], False

    def end():
        guesses, waited = in_flight.pop(0)
        assert speculator.has_waited == waited
        speculator.measured(1, guesses, 0.1, 0.1 + (guess_s if guesses else 0.0))
        if guesses:
            speculator.verified("0.9", guesses, num_right(guesses))
        speculator.completed()
        found.append(guesses)

    while len(found) < steps:
        guesses = 0
        item.num_in_flight_samples = len(in_flight)
        if in_flight and (in_flight[-1][0] or speculator.awaits([item], 64, 0.1)):
            has_waited = True
            end()
            item.num_in_flight_samples = 0
        if not in_flight and not speculator.rests(1):
            guesses = len(speculator.propose([item], 64, 0.1).get("0.9", ()))
        speculator.planned(has_waited=has_waited)
        in_flight.append((guesses, has_waited))
        has_waited = False
        if len(in_flight) > 1:
            end()
    return found


@pytest.mark.parametrize("gains", [True, False])
def test_whether_waiting_for_guesses_gains_is_tried_in_turns(gains):
    speculator = Speculator([Sure()])
    speculator._costs = Free()
    found = answered_ahead(speculator, 4000, *((0.1, lambda guesses: guesses) if gains else (0.2, lambda _: 1)))
    guessing = sum(map(bool, found[1000:])) / 3000
    trial = ARM_STEPS * len(ARMS)
    assert guessing > 1 - 2 * trial / LONGEST_STAY if gains else guessing < trial / LONGEST_STAY


class SevensHead:
    """A head's runner that guesses 7, behind steps that gave it what it guesses with."""

    is_queued = False

    def __init__(self):
        self.has_begun = False

    def is_ready(self, _sequence_id, _position):
        return self.has_begun

    def guess(self, guesses):
        return [[SampledToken(7, 0.0) for _ in guess.specs] for guess in guesses]


def answered_with_head(begin_s, steps=3000):
    """Guesses of each step of one sequence of sevens, one at most: a step takes 0.1 s, and `begin_s` more where it
    gives what the head guesses with."""
    runner = SevensHead()
    speculator = Speculator([], model=HeadModel(runner, KVGroups(16), 10**6, clock=lambda: 0.0))
    item = sequence("s", [7, 7], max_tokens=10**5, speculation=Speculation("heads", 1))
    item.block_ids, found = list(range(10**4)), []
    for _ in range(steps):
        rests = speculator.rests(1)
        guesses = 0 if rests else len(speculator.propose([item], 64, 0.1).get("s", ()))
        found.append(guesses)
        runner.has_begun = speculator.follows_steps
        if not rests:
            speculator.measured(1, guesses, 0.1, 0.1 + begin_s * runner.has_begun)
            speculator.verified("s", guesses, guesses)
        item.token_ids += [7] * (1 + guesses)
    return found


@pytest.mark.parametrize(("begin_s", "gains"), [(0.05, True), (0.15, False)])
def test_a_head_is_asked_where_its_guesses_are_worth_what_all_steps_pay_for_it(begin_s, gains):
    """Two tokens in 0.15 s, or in 0.25 s, beside one in 0.1 s."""
    found = answered_with_head(begin_s)
    assert sum(found[1500:]) / 1500 > 0.9 if gains else sum(found[1500:]) / 1500 < 0.1


def test_a_heads_first_guess_is_behind_the_newest_state_and_each_further_one_behind_the_guess_before():
    asked: list[HeadGuess] = []

    class Asked(SevensHead):
        def guess(self, guesses):
            asked.extend(guesses)
            return super().guess(guesses)

    runner, item = Asked(), sequence("s", [2] * 7, max_tokens=99)
    runner.has_begun, item.block_ids = True, [0, 1]
    head = HeadModel(runner, KVGroups(16), 100)
    assert head.is_ready(item)
    draft = head.begin(item, 3)
    for _ in range(3):
        head.round([draft])
    assert [(guess.position, guess.token_id) for guess in asked] == [(5, None), (6, 7), (7, 7)]


def test_blocks_are_taken_ahead_for_what_may_be_guessed_in_them_alone():
    head = Speculator([Sure()], model=HeadModel(SevensHead(), KVGroups(16), 100))
    for speculation, ahead in (("auto", 15), ("ngram", 0), ("off", 0), ("heads", 15)):
        asked = Speculation(speculation)
        assert head.num_written_ahead(sequence("s", [2, 3], max_tokens=99, speculation=asked)) == ahead
    assert head.num_written_ahead(sequence("s", [2, 3], max_tokens=99, speculation=Speculation("heads", 4))) == 4
    assert head.num_written_ahead(sequence("s", [2, 3], max_tokens=3)) == 2
    assert head.num_written_ahead(sequence("s", [2] * 100, max_tokens=9)) == 0  # it has no positions for more
    assert Speculator([Sure()]).num_written_ahead(sequence("s", [2, 3], max_tokens=99)) == 0


@pytest.mark.parametrize(
    ("given", "field"), [({"method": "magic"}, "speculation.method"), ({"most_guesses": 0}, "speculation.max")]
)
def test_what_cannot_be_done_is_refused_by_name(given, field):
    with pytest.raises(InvalidRequest) as refused:
        Speculation(**given)
    assert refused.value.details["field"] == field
