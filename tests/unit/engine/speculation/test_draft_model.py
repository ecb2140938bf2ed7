"""What a draft model computes, and when it is asked."""

from __future__ import annotations

import math
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.plan import NoToken, SampledToken, StepPlan, StepResult
from shared.engine.sampling_params import MOST_GUESSES, Speculation
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.draft_model import FEW_TOKENS, MOST_CHUNK, DraftModel
from shared.engine.speculation.drafter import Draft
from shared.engine.speculation.gain import ARM_STEPS
from shared.engine.speculation.model_rounds import CATCH_UP_SHARE, PROBE_EVERY
from shared.engine.speculation.speculator import PLAIN_EVERY, Speculator
from shared.kv.pool import BlockPool
from tests.examples import examples
from tests.unit.engine.builders import sequence

BLOCK = 4
PLAIN_S = 0.1
MISSING = -1


class Runner:
    """Remembers whose KV lies where, and checks that each sample is behind the KV of all tokens before it."""

    def __init__(self, next_token=lambda tokens: 7, round_s: float = 0.01, token_s: float = 0.0) -> None:
        self.kv: dict[int, list[int]] = {}  # tokens whose KV each block has
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.logprob = -0.2
        self._next = next_token
        self.round_s, self.token_s = round_s, token_s

    is_async = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.now += self.round_s + self.token_s * plan.num_tokens
        sampled: list[SampledToken | NoToken] = []
        for item in plan.sequences:
            for place, token_id in enumerate(item.token_ids, item.start):
                self.kv.setdefault(item.block_ids[place // BLOCK], [MISSING] * BLOCK)[place % BLOCK] = token_id
            blocks = item.block_ids[: -(-item.end // BLOCK)]
            tokens = list(chain.from_iterable(self.kv[block] for block in blocks))[: item.end]
            assert MISSING not in tokens
            for spec in item.samples:
                assert spec.position == item.end
                assert spec.params.structured_output is None
                self.check(item.sequence_id, tokens)
                token_id = self._next(tokens)
                sampled.append(NoToken() if token_id < 0 else SampledToken(token_id, self.logprob))
        return StepResult(tuple(sampled))

    def check(self, sequence_id: str, tokens: list[int]) -> None:
        """Replaced where it is known which tokens there are."""


def model_of(runner: Runner, num_blocks: int = 64, most_tokens: int = 1000) -> DraftModel:
    return DraftModel(runner, BlockPool(num_blocks, BLOCK), most_tokens, clock=lambda: runner.now)


def answer(item: EngineSequence, guesses: tuple[int, ...], token_of) -> int:
    """The target takes its own tokens as far as guesses are right; returns how many were."""
    for place, guess in enumerate((*guesses, None)):
        token_id = token_of(item.token_ids)
        item.token_ids.append(token_id)
        if token_id != guess:
            return place
    return len(guesses)


@examples(150)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([3, 9, 60]),
    fixed=st.sampled_from([None, 1, 4, MOST_GUESSES]),
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_every_guess_follows_the_sequences_own_tokens_and_no_block_leaks(seed, num_blocks, fixed, share):
    random = Random(seed)
    runner = Runner(lambda tokens: sum(tokens) % 5 + 2)
    model = model_of(runner, num_blocks)
    speculator = Speculator([], fixed, model)
    live: dict[str, EngineSequence] = {}
    guessed: dict[str, list[int]] = {}

    def check(sequence_id: str, tokens: list[int]) -> None:
        known = live[sequence_id].token_ids
        if len(tokens) <= len(known):
            guessed[sequence_id] = []
        behind = guessed.setdefault(sequence_id, [])
        assert tokens == [*known, *behind]
        behind.append(sum(tokens) % 5 + 2)

    runner.check = check
    for turn in range(60):
        if random.random() < 0.2 or not live:
            item = sequence(f"s{turn}", [random.randint(2, 3) for _ in range(random.randint(1, 30))], max_tokens=40)
            live[item.sequence_id] = item
        for name in list(live):
            if random.random() < 0.05:
                speculator.lost(name)
            if random.random() < 0.05 or live[name].num_guessable_tokens < 0:
                speculator.ended(name)
                del live[name]
        items = [item for item in live.values() if random.random() < 0.8]
        found = speculator.propose(items, 64, PLAIN_S, math.inf)
        assert sum(map(len, found.values())) <= 64
        for item in items:
            guesses = found.get(item.sequence_id, ())
            assert len(guesses) <= item.num_guessable_tokens
            taken = guesses[: random.randint(0, len(guesses))] if random.random() < 0.2 else guesses
            right = random.random() < share
            num_right = answer(item, taken, lambda tokens, right=right: sum(tokens) % 5 + 2 + (not right))
            speculator.verified(item.sequence_id, len(taken), num_right)
        speculator.take_drafting_s()
        model.pool.check_integrity()
    for name in live:
        speculator.ended(name)
    assert model.pool.num_used == 0


def run(speculator: Speculator, item: EngineSequence, token_of, steps: int, **step) -> list[int]:
    """Guesses of each step."""
    found = []
    for _ in range(steps):
        guesses = speculator.propose([item], 64, step.get("plain_s", PLAIN_S), step.get("limit_s", math.inf))
        guesses = guesses.get(item.sequence_id, ())
        found.append(len(guesses))
        num_right = answer(item, guesses, token_of)
        speculator.verified(item.sequence_id, len(guesses), num_right)
        speculator.take_drafting_s()
        speculator.measured(1, len(guesses), PLAIN_S, PLAIN_S * (1 + 0.02 * len(guesses)))
    return found


def test_a_draft_that_is_right_is_asked_for_many_and_one_that_is_wrong_for_hardly_any():
    good, bad = model_of(Runner(round_s=0.005), 600, 5000), model_of(Runner(round_s=0.005), 600, 5000)
    right = run(Speculator([], None, good), sequence("a", [2] * 9, max_tokens=4000), lambda _: 7, 200)
    assert sum(right[100:]) > 6 * 100
    wrong = run(Speculator([], None, bad), sequence("b", [2] * 9, max_tokens=4000), lambda _: 8, 400)
    assert sum(wrong[200:]) <= 200 / PROBE_EVERY + 2 * ARM_STEPS  # a trial of its gain, at most one guess a step
    num_rounds = sum(bool(item.samples) for plan in bad._runner.plans[-8:] for item in plan.sequences)
    assert num_rounds <= 8
    assert len(bad._runner.plans) < 60 + 2 * 400 / PROBE_EVERY


def test_a_guess_that_the_draft_is_surer_of_is_expected_to_be_right_more_often():
    chances = []
    for probability in (0.02, 0.07, 0.15, 0.25, 0.4, 0.5, 0.7, 0.8, 0.95):
        runner, item = Runner(), sequence("a", [2] * 9, max_tokens=50)
        runner.logprob = math.log(probability)
        model = model_of(runner)
        while not model.is_ready(item):
            model.catch_up(item, PLAIN_S)
        drafted = model.begin(item, 1)
        model.round([drafted])
        chances += drafted.chances
    assert chances == sorted(set(chances))


def test_tokens_are_computed_once_also_those_that_came_since_the_last_round():
    runner, item = Runner(), sequence("a", [2] * 9, max_tokens=50)
    model = model_of(runner)
    while not model.is_ready(item):
        model.catch_up(item, PLAIN_S)
    item.token_ids += [2, 2]  # computed by the next round
    computed = []
    for _ in range(3):
        assert model.is_ready(item)
        model.round([model.begin(item, 1)])
        computed.append(runner.plans[-1].num_tokens)
        item.token_ids.append(7)
    assert computed[0] > 1
    assert computed[1:] == [1, 1]


def test_a_round_that_takes_as_long_as_a_step_is_not_worth_it():
    model = model_of(Runner(round_s=PLAIN_S), 600, 5000)
    found = run(Speculator([], None, model), sequence("a", [2] * 9, max_tokens=4000), lambda _: 7, 300)
    assert sum(found[100:]) <= 300 / PROBE_EVERY


def test_a_wrong_draft_is_asked_again_now_and_then_and_comes_back_when_it_is_right():
    model = model_of(Runner(round_s=0.005), 2000, 9000)
    speculator, item = Speculator([], None, model), sequence("a", [2] * 9, max_tokens=8000)
    run(speculator, item, lambda _: 8, 300)
    found = run(speculator, item, lambda _: 7, 4 * PROBE_EVERY)
    assert sum(found[-50:]) > 6 * 50


def test_what_it_takes_is_within_what_the_step_may_take():
    model = model_of(Runner(round_s=0.01), 600, 5000)
    speculator, item = Speculator([], None, model), sequence("a", [2] * 9, max_tokens=4000)
    run(speculator, item, lambda _: 7, 50)
    for limit_s in (PLAIN_S, 0.115, 0.14):
        before = model.total_s
        found = run(speculator, item, lambda _: 7, 1, limit_s=limit_s)
        assert PLAIN_S * (1 + 0.02 * found[0]) + model.total_s - before <= limit_s + 1e-9
    assert found[0] > 0


def test_prompts_are_computed_a_few_tokens_a_step():
    runner = Runner(round_s=0.001, token_s=0.0002)
    model = model_of(runner, 4000, 9000)
    speculator = Speculator([], None, model)
    run(speculator, sequence("a", [2] * 9, max_tokens=500), lambda _: 7, 60)
    item = sequence("b", list(range(2, 1502)), max_tokens=2000)
    begun, steps = len(runner.plans), 0
    while run(speculator, item, lambda _: 7, 1) == [0]:
        steps += 1
        assert steps < 50
    assert all(plan.num_tokens * 0.0002 <= CATCH_UP_SHARE * PLAIN_S for plan in runner.plans[begun:])
    assert steps > 1500 * 0.0002 / (CATCH_UP_SHARE * PLAIN_S)


def test_a_prompt_that_an_answer_cannot_pay_for_is_not_computed():
    runner = Runner(round_s=0.001, token_s=0.001)
    model = model_of(runner, 4000, 9000)
    speculator = Speculator([], None, model)
    run(speculator, sequence("a", [2] * 9, max_tokens=500), lambda _: 7, 60)
    begun = len(runner.plans)
    run(speculator, sequence("b", list(range(2, 1502)), max_tokens=20), lambda _: 7, 10)
    assert len(runner.plans) == begun


def test_a_prompts_time_is_that_of_its_steps():
    runner = Runner(round_s=0.001, token_s=0.0002)
    model = model_of(runner, 4000, 9000)
    item = sequence("b", list(range(2, 3 * MOST_CHUNK)), max_tokens=20)  # two tokens less than three whole steps
    assert model.prompt_s(item) == 0.0
    run(Speculator([], None, model), sequence("a", [2] * 9, max_tokens=500), lambda _: 7, 60)
    assert model.prompt_s(item) == pytest.approx(3 * runner.round_s + item.num_tokens * runner.token_s, rel=0.02)


def test_a_prefix_that_was_computed_before_is_found():
    runner = Runner()
    model = model_of(runner)
    prompt = list(range(2, 35))
    for name in ("a", "b"):
        item = sequence(name, prompt, max_tokens=9)
        begun = len(runner.plans)
        model.catch_up(item, math.inf)
        assert model.is_ready(item) or name == "a"
        while not model.is_ready(item):
            model.catch_up(item, math.inf)
        computed = sum(plan.num_tokens for plan in runner.plans[begun:])
        assert computed == (0 if name == "b" else computed)
        if name == "a":
            assert len(prompt) - FEW_TOKENS <= computed < len(prompt)
        model.forget(name)


def test_guesses_stop_where_the_draft_has_no_positions_more():
    model = model_of(Runner(), most_tokens=20)
    speculator, item = Speculator([], MOST_GUESSES, model), sequence("a", [2] * 12, max_tokens=99)
    assert sum(run(speculator, item, lambda _: 7, 1)) == 8
    assert item.num_tokens == 21
    assert run(speculator, item, lambda _: 7, 3) == [0, 0, 0]


def test_a_draft_whose_numbers_break_guesses_no_more_for_that_sequence():
    model = model_of(Runner(lambda tokens: -1 if len(tokens) > 14 else 7))
    speculator, item = Speculator([], MOST_GUESSES, model), sequence("a", [2] * 12, max_tokens=99)
    assert run(speculator, item, lambda _: 7, 4) == [3, 0, 0, 0]


@pytest.mark.parametrize(("choice", "count"), [("auto", 15), ("draft", 15), ("ngram", 0), ("off", 0)])
def test_a_request_says_whether_it_is_asked(choice: str, count: int):
    speculator = Speculator([], MOST_GUESSES, model_of(Runner()))
    item = sequence("a", [2] * 9, max_tokens=99, speculation=Speculation(choice))
    assert run(speculator, item, lambda _: 7, 1) == [count]


def test_what_is_surer_and_free_comes_before_the_draft():
    class Free:
        method = "ngram"

        def propose(self, item, most):
            return Draft((7,) * most, (1.0,) * most)

        def forget(self, sequence_id):
            pass

    runner = Runner()
    speculator = Speculator([Free()], None, model_of(runner, 600, 5000))
    run(speculator, sequence("a", [2] * 9, max_tokens=4000), lambda _: 7, PLAIN_EVERY)
    assert sum(bool(item.samples) for plan in runner.plans for item in plan.sequences) <= 2 * PLAIN_EVERY / PROBE_EVERY
    assert speculator.counters.num_guesses["ngram"] > speculator.counters.num_guesses["draft"]
