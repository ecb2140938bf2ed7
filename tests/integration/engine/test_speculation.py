"""An answer is the same whatever is guessed of it: tokens, ends and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.engine.finish_reason import FinishReason
from shared.engine.messages import AddSequence, StepOutput
from shared.engine.plan import SampledToken
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sampling_params import MOST_GUESSES, Speculation
from shared.engine.speculation.drafter import Drafter
from shared.engine.speculation.grammar import GrammarDrafter
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.model.families.registry import load_config
from shared.model.ranks.shard import Degrees
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import StructuredOutput, StructureKind
from tests.demo import DEMO
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import EXPERTS, OTHERS, write_family
from tests.integration.engine.group_run import GroupRun
from tests.unit.engine.speculation.drafters import HostileDrafter, KnowingDrafter

LENGTH = 32
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
OBJECT = StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA))
VERSES = StructuredOutput(StructureKind.REGEX, "([a-z]{3}[0-9]{2},)+")
WAYS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "seed": 12, "top_k": 30, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logprobs": 0},
    {"temperature": 0.8, "seed": 13, "frequency_penalty": 0.5, "bad_sequences": ((30,), (16, 282), (5, 6, 7))},
    {"logit_bias": ((16, 3.0), (30, -100.0)), "bad_sequences": ((18,),)},
    {"min_tokens": 30, "stop_token_ids": (16, 18)},
    {"stop_token_ids": (18,), "temperature": 0.7, "seed": 17},
    {"structured_output": OBJECT, "temperature": 1.0, "seed": 14, "logprobs": 1},
    {"structured_output": VERSES, "frequency_penalty": 0.3, "temperature": 2.0, "seed": 15},
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.1, "temperature": 0.7, "seed": 16, "min_tokens": 20, "bad_sequences": ((16, 30), (18,))},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.05, "logprobs": 1},
    {"bad_sequences": ((16, 282), (282, 5, 16), (9, 18)), "logit_bias": ((16, 2.0), (282, 2.0))},
]
PROMPTS = [[5 + (i * (2 * k + 3)) % 300 for i in range(9 + 5 * k)] for k in range(len(WAYS))]
Answer = tuple[list[SampledToken], FinishReason]


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., EngineRun]]:
    """Engines over the demo model, closed at the end."""
    runs: list[EngineRun] = []
    config, tokenizer = load_config(DEMO), Tokenizer.load(DEMO)

    def begin(*drafters: Drafter, **settings: Any) -> EngineRun:
        structures = StructureCompiler(lambda: tokenizer, config.eos_token_ids, config.vocab_size)
        speculator = Speculator(drafters, num_guesses=MOST_GUESSES) if drafters else None
        eos = frozenset(config.eos_token_ids)
        settings = {"num_blocks": 400, "config": RunnerConfig(max_num_seqs=16), "eos": eos, **settings}
        runs.append(EngineRun(DEMO, structures=structures, speculator=speculator, **settings))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def answers(run: EngineRun, ways: list[dict[str, Any]] = WAYS, length: int = LENGTH) -> list[Answer]:
    """Of prompts that run together, each its own way."""
    sequences = [run.sequence(prompt, length, **way) for prompt, way in zip(PROMPTS, ways, strict=False)]
    for item in sequences:
        run.engine.submit(AddSequence(item))
    found: dict[str, list[SampledToken]] = {item.sequence_id: [] for item in sequences}
    ends: dict[str, FinishReason] = {}
    while len(ends) < len(found):
        for token in run.next(StepOutput).tokens:
            assert token.sequence_id not in ends, "a token behind the end"
            found[token.sequence_id].append(token.token)
            if token.finish_reason:
                ends[token.sequence_id] = token.finish_reason
    return [(found[name], ends[name]) for name in found]


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    """In fp32 sums of several rows may differ in their last bits: the tokens are the same, their logits nearly."""
    assert [(ids(tokens), end) for tokens, end in found] == [(ids(tokens), end) for tokens, end in expected]
    for (tokens, _), (others, _) in zip(found, expected, strict=True):
        for token, other in zip(tokens, others, strict=True):
            assert (token.logprob is None) == (other.logprob is None)
            if token.logprob is not None:
                assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token_id for token_id, _ in token.top] == [token_id for token_id, _ in other.top]


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def accepted(run: EngineRun) -> tuple[int, int]:
    speculator = run.scheduler._speculator
    assert speculator is not None
    return sum(speculator.counters.num_guesses.values()), sum(speculator.counters.num_accepted.values())


@pytest.fixture(scope="module")
def plain(start) -> list[Answer]:
    return answers(start())


@pytest.fixture(scope="module")
def known(plain) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): ids(tokens) for prompt, (tokens, _) in zip(PROMPTS, plain, strict=True)}


def test_the_ways_end_in_every_way(plain):
    assert {end for _, end in plain} == {FinishReason.STOP, FinishReason.LENGTH}


AHEAD = {"ahead": True, "config": RunnerConfig(max_num_seqs=16, static_decode=True)}
"""As on a GPU: a step is launched while the one before runs, and decode steps are padded."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param(x, marks=pytest.mark.slow) for x in ({"num_blocks": 24}, AHEAD)),
        {"num_blocks": 24, "num_host_blocks": 100},
        {**AHEAD, "num_blocks": 24, "num_host_blocks": 100},
    ],
)
def test_guesses_by_chance_change_nothing(start, plain, options):
    run = start(HostileDrafter(), **options)
    assert_same(answers(run), plain)
    assert accepted(run)[0] > 0
    assert (run.scheduler.counters.num_preemptions > 0) == ("num_blocks" in options)


each_order = pytest.mark.parametrize("options", [{}, AHEAD], ids=["in turn", "ahead"])


@each_order
@pytest.mark.parametrize(
    "twist",
    [
        lambda place, token: token,
        lambda place, token: token + 1,
        lambda place, token: token if place < 2 else 2,
        lambda place, token: token if place % 3 else 16,
    ],
    ids=["all right, and past the end", "all wrong", "two right", "wrong in between"],
)
def test_right_and_wrong_guesses_change_nothing(start, plain, known, twist, options):
    run = start(KnowingDrafter(known, twist), **options)
    assert_same(answers(run), plain)


@each_order
def test_right_guesses_come_in_one_step(start, plain, known, options):
    run = start(KnowingDrafter(known), **options)
    assert_same(answers(run, WAYS[:1]), plain[:1])
    num_guesses, num_accepted = accepted(run)
    steps = run.engine.steps
    assert (num_guesses, num_accepted) == (LENGTH - 1 - -(-(LENGTH - 1) // (MOST_GUESSES + 1)),) * 2
    assert steps.num_steps == 1 + -(-(LENGTH - 1) // (MOST_GUESSES + 1))
    assert steps.gaps_s.cumulative()[-1] == LENGTH - 1


@each_order
@pytest.mark.parametrize("way", [3, 4, 11, 12, 13])
def test_right_guesses_come_in_one_step_where_earlier_tokens_change_the_next_ones(start, plain, known, way, options):
    """Each guess is counted before the next one's token is chosen, else some of the right ones would be wrong."""
    run = start(KnowingDrafter(known), **options)
    prompt, (expected, _) = PROMPTS[way], plain[way]
    assert run.generate(prompt, max_tokens=LENGTH, **WAYS[way]) == [ids(expected)]
    num_guesses, num_accepted = accepted(run)
    assert num_accepted > 0
    assert num_accepted >= num_guesses - MOST_GUESSES  # but for those behind the answer's end


@each_order
def test_the_answers_own_text_and_its_structure_are_guessed(start, plain, options):
    tokenizer, config = Tokenizer.load(DEMO), load_config(DEMO)
    structures = StructureCompiler(lambda: tokenizer, config.eos_token_ids, config.vocab_size)
    structures.compile(OBJECT)
    run = start(NgramDrafter(), GrammarDrafter(structures.prepare), **options)
    assert_same(answers(run), plain)
    speculator = run.scheduler._speculator
    assert speculator is not None
    accepted = speculator.counters.num_accepted
    assert all(accepted[drafter.method] > 0 for drafter in (NgramDrafter, GrammarDrafter))


def test_a_request_says_whether_and_how_far_is_guessed(start, plain, known):
    run = start(KnowingDrafter(known))
    off = [{**way, "speculation": Speculation("off")} for way in WAYS]
    assert_same(answers(run, off), plain)
    assert accepted(run) == (0, 0)
    assert_same(answers(run, [{**WAYS[0], "speculation": Speculation("auto", 1)}]), plain[:1])
    assert accepted(run) == (15, 15)  # every second of the 31 tokens that decode steps give


@each_order
def test_a_handed_over_answer_is_the_same(start, plain, known, options):
    prefill, decode = start(HostileDrafter(), **options), start(KnowingDrafter(known), HostileDrafter(), **options)
    for prompt, way, (expected, _) in zip(PROMPTS, WAYS, plain, strict=True):
        assert hand_off(prefill, decode, prompt, LENGTH, **way) == ids(expected)
    assert accepted(prefill) == (0, 0), "a prefill worker guesses nothing"
    assert accepted(decode)[1] > 0


@each_order
def test_an_answer_that_goes_on_elsewhere_is_the_same(start, plain, known, options):
    run = start(KnowingDrafter(known), HostileDrafter(), **options)
    for prompt, way, (expected, _) in zip(PROMPTS, WAYS, plain, strict=True):
        kept = ids(expected)[: len(expected) // 2]
        assert [*kept, *run.continued(prompt, kept, LENGTH, **{**way, "prompt_logprobs": None})] == ids(expected)


@each_order
def test_nothing_is_found_behind_a_prefix_of_wrong_guesses(start, plain, known, options):
    """Blocks are known by the hashes of tokens that answers have: a prompt that goes on as a wrong guess did finds none
    of what was computed for it."""
    run = start(KnowingDrafter(known, lambda place, token: (token + 1) % 300), **options)
    (tokens, _), *_ = answers(run, WAYS[:1])
    whole = [*PROMPTS[0], *ids(tokens)]
    again = [(run.generate(whole[:count], max_tokens=4)[0], count) for count in range(17, len(whole) - 4, 16)]
    assert all(found == whole[count : count + 4] for found, count in again)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_guesses_change_nothing(start, plain, known, seed):
    run = start(HostileDrafter(seed, 40), KnowingDrafter(known, lambda place, token: token if seed >> place & 1 else 5))
    assert_same(answers(run), plain)
    run.close()


@pytest.mark.parametrize("way", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_in_deterministic_bf16_answers_are_the_same_to_the_bit(start, way):
    options = {"dtype": torch.bfloat16, "kv_dtype": "bfloat16", "deterministic": True}
    ways = [WAYS[way], {**WAYS[0]}]
    expected = answers(start(**options), ways)
    known = {tuple(prompt): ids(tokens) for prompt, (tokens, _) in zip(PROMPTS, expected, strict=False)}
    wrong = KnowingDrafter(known, lambda place, token: token if place < 3 else 7)
    for drafters in ((KnowingDrafter(known),), (wrong,), (HostileDrafter(),), (NgramDrafter(),)):
        assert answers(start(*drafters, **options), ways) == expected


FIRST_FAMILIES = ("deepseek-v2", "gemma3")
"""Of all families, those of the default tier: latents with experts, and windows."""


def right_and_wrong(folder: Path) -> tuple[list[list[int]], list[list[int]], tuple[Drafter, Drafter]]:
    """Two prompts, their answers without guesses, and drafters: one is right, the other right four times."""
    prompts = [[token % 211 for token in prompt] for prompt in (PROMPTS[1], PROMPTS[4])]
    with EngineRun(folder) as run:
        expected = run.generate(*prompts, max_tokens=LENGTH)
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    wrong = KnowingDrafter(known, lambda place, token: token if place < 4 else 7)
    return prompts, expected, (KnowingDrafter(known), wrong)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in FIRST_FAMILIES else pytest.mark.slow) for name in (*EXPERTS, *OTHERS)],
)
def test_guesses_change_no_familys_answer(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family)
    prompts, expected, drafters = right_and_wrong(folder)
    for drafter in (*drafters, HostileDrafter(3, 200)):
        speculator = Speculator([drafter], num_guesses=MOST_GUESSES)
        with EngineRun(folder, speculator=speculator) as run:
            assert run.generate(*prompts, max_tokens=LENGTH) == expected


AS_ON_GPUS = {"own_pools": True, "backend": "gloo", "ahead": True}


@pytest.mark.parametrize(
    ("degrees", "how"),
    [
        (Degrees(2), {}),
        (Degrees(2), AS_ON_GPUS),
        *(pytest.param(Degrees(1, 2), how, marks=pytest.mark.slow) for how in ({}, AS_ON_GPUS)),
    ],
)
def test_guesses_change_no_answer_of_a_group(tmp_path: Path, degrees: Degrees, how: dict[str, Any]) -> None:
    folder = write_family(tmp_path, "Qwen3ForCausalLM")
    prompts, expected, drafters = right_and_wrong(folder)
    for drafter in drafters:
        speculator = Speculator([drafter], num_guesses=MOST_GUESSES)
        with GroupRun(folder, degrees, speculator=speculator, **how) as run:
            assert run.generate(*prompts, max_tokens=LENGTH) == expected
            assert accepted(run)[1] > 0
