"""How many guesses `auto` makes, beside fixed numbers of them: real texts, steps that take what was measured."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from loadtest.bench.speculation.texts import CASES
from loadtest.rig.models import DEMO
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.model.text.tokenizer import Tokenizer
from tests.unit.engine.builders import sequence

NUM_STEPS, NUM_TEXTS, NUM_TOKENS = 500, 24, 96
NOISE = 0.02
"""Spread of the logarithm of a step's time."""


def step_s(num_sequences: int, num_guesses: int) -> float:
    """A step of the 1b shape in bf16 on two cores of an EPYC (Zen 5, no AMX)."""
    return 0.033 + 0.00133 * (num_sequences - 1) + 0.00115 * num_guesses


@functools.cache
def texts(case: str) -> list[tuple[list[int], list[int]]]:
    tokenizer, made = Tokenizer.load(DEMO), [CASES[case](number) for number in range(NUM_TEXTS)]
    return [
        (
            tokenizer.encode(text.prompt)[:256],
            tokenizer.encode(text.answer[:2000], add_special_tokens=False)[:NUM_TOKENS],
        )
        for text in made
    ]


def tokens_a_second(case: str, batch: int, num_guesses: int | None) -> float:
    """Of a batch in which the next answer begins where one has ended. `num_guesses`: as for a `Speculator`."""
    rng, names, now = random.Random(1), itertools.count(), [0.0]
    speculator = Speculator([NgramDrafter()], num_guesses, processor_clock=lambda: now[0])
    live, num_tokens = {}, 0
    for _ in range(NUM_STEPS):
        while len(live) < batch:
            number = next(names)
            prompt, answer = texts(case)[number % NUM_TEXTS]
            item = sequence(f"s{number}", list(prompt), max_tokens=len(answer))
            # The first ones are spread over their answers.
            item.token_ids.extend(answer[: 1 + 7 * number % NUM_TOKENS // 2 if number < batch else 1])
            item.num_computed_tokens = len(item.token_ids) - 1
            live[item.sequence_id] = item, answer
        plain_s, found = step_s(batch, 0), {}
        if not speculator.rests(batch):
            found = speculator.propose([item for item, _ in live.values()], 512, plain_s)
        count = sum(map(len, found.values()))
        took_s = step_s(batch, count) * rng.lognormvariate(0.0, NOISE)
        now[0] += took_s
        speculator.planned(has_waited=False)
        if not speculator.is_resting:
            speculator.measured(batch, count, plain_s, took_s)
        for name, (item, answer) in list(live.items()):
            at, guesses = len(item.token_ids) - item.num_prompt_tokens, found.get(name, ())
            right = len(
                list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(guesses, answer[at:-1], strict=False)))
            )
            item.token_ids.extend(answer[at : at + right + 1])
            item.num_computed_tokens = len(item.token_ids) - 1
            num_tokens += right + 1
            if guesses:
                speculator.verified(name, len(guesses), right)
            if at + right + 1 >= len(answer):
                del live[name]
                speculator.ended(name)
        speculator.completed()
    return num_tokens / now[0]


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("case", ["edit", "chat"])
def test_auto_is_as_fast_as_the_best_fixed_number_and_as_none(case, batch):
    none = batch / step_s(batch, 0)
    best = max(none, *(tokens_a_second(case, batch, count) for count in (1, 2, 4, 8)))
    found = tokens_a_second(case, batch, None)
    assert found >= 0.98 * best
    if case == "edit":
        assert found >= 1.15 * none
