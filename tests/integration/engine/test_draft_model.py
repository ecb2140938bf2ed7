"""An answer is the same whatever a draft model guesses of it, and a good one's guesses come true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.engine.plan import SampledToken, StepPlan, StepResult
from shared.engine.runner.draft import draft_layout, load_draft, open_draft
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sampling_params import MOST_GUESSES, Speculation
from shared.engine.speculation.draft_model import DraftModel
from shared.engine.speculation.ngram import NgramDrafter
from shared.engine.speculation.speculator import Speculator
from shared.errors import ConfigError, ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.model.ranks.shard import Degrees
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler
from tests.demo import DEMO
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.families import write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_speculation import (
    AS_ON_GPUS,
    LENGTH,
    PROMPTS,
    WAYS,
    accepted,
    answers,
    assert_same,
    ids,
)

FREE = [way for way in WAYS if "structured_output" not in way]
"""Ways in which the draft chooses by the same rules as the target."""
LONG = 80
"""Output tokens with which the batch outgrows 24 blocks."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the demo model's vocabulary with random weights."""
    config = load_config(DEMO)
    folder = tmp_path_factory.mktemp("other")
    write_random_checkpoint(folder, vocab_size=config.vocab_size, hidden_size=64, num_layers=1)
    return folder


def draft(
    folder: Path = DEMO,
    num_blocks: int = 400,
    dtype: torch.dtype = torch.float32,
    config: RunnerConfig | None = None,
    *,
    is_queued: bool = False,
) -> DraftModel:
    decoder = load_draft(folder, dtype, load_config(DEMO).vocab_size)
    model = open_draft(decoder, draft_layout(decoder, BLOCK_SIZE), num_blocks, 16, config)
    model.is_queued = is_queued
    return model


STATIC = RunnerConfig(max_num_seqs=16, static_decode=True)


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., EngineRun]]:
    """Engines over the demo model with a draft, closed at the end."""
    runs: list[tuple[EngineRun, DraftModel | None]] = []
    config, tokenizer = load_config(DEMO), Tokenizer.load(DEMO)

    def begin(model: DraftModel | None = None, num_guesses: int | None = MOST_GUESSES, **options: Any) -> EngineRun:
        structures = StructureCompiler(lambda: tokenizer, config.eos_token_ids, config.vocab_size)
        speculator = Speculator([], num_guesses, model) if model is not None else None
        eos = frozenset(config.eos_token_ids)
        options = {"num_blocks": 400, "config": RunnerConfig(max_num_seqs=16), "eos": eos, **options}
        run = EngineRun(DEMO, structures=structures, speculator=speculator, **options)
        runs.append((run, model))
        return run

    yield begin
    for run, model in runs:
        run.end()
        if model is not None:
            model.pool.check_integrity()
            assert model.pool.num_used == 0, "a block of the draft's pool leaked"


@pytest.fixture(scope="module")
def plain(start):
    return answers(start())


@pytest.fixture(scope="module")
def plain_and_long(start):
    return answers(start(), length=LONG)


def test_a_draft_that_is_the_target_is_always_right(start, plain):
    """With the same logits the shared randomness gives the same token, sampled or not, with penalties, biased or
    banned."""
    for way in FREE:
        run = start(draft())
        assert_same(answers(run, [way]), answers(start(), [way]))
        num_guesses, num_accepted = accepted(run)
        assert num_guesses > 0
        # Where an answer ends, guesses behind its end were computed.
        assert num_accepted >= num_guesses - MOST_GUESSES, way
        assert run.engine.steps.num_steps < LENGTH / 2


def test_a_draft_beside_steps_ahead_is_right_in_rounds_that_follow_each_other_unseen(start, plain):
    """As on a GPU: its rounds are padded, too, and each is launched before the one before is known."""
    for way in FREE:
        run = start(draft(config=STATIC, is_queued=True), 7, config=STATIC, ahead=True)
        assert_same(answers(run, [way]), answers(start(), [way]))
        num_guesses, num_accepted = accepted(run)
        assert num_accepted >= num_guesses - 7, way
        assert run.engine.steps.num_steps < LENGTH / 2
    run = start(draft(config=STATIC, is_queued=True), 7, config=STATIC, ahead=True)
    assert_same(answers(run), plain)


def test_the_demo_models_draft_is_right_far_more_often_than_by_chance(start):
    prompts = [Tokenizer.load(DEMO).encode(text) for text in ("And God said,", "The king went up to the house of")]
    for way in ({}, {"temperature": 0.8, "seed": 5}):
        run = start(draft(DEMO.with_name("demo-draft")), 2)
        assert run.generate(*prompts, max_tokens=120, **way) == start().generate(*prompts, max_tokens=120, **way)
        num_guesses, num_accepted = accepted(run)
        assert num_accepted > 0.1 * num_guesses > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"num_blocks": 24}, marks=pytest.mark.slow),
        pytest.param({"num_blocks": 24, "num_host_blocks": 100}, marks=pytest.mark.slow),
        {"num_blocks": 24, "num_host_blocks": 100, "ahead": True},
    ],
)
def test_a_draft_changes_nothing_for_a_batch(start, plain_and_long, options):
    run = start(draft(is_queued="ahead" in options), **options)
    assert_same(answers(run, length=LONG), plain_and_long)
    assert accepted(run)[1] > 0
    assert (run.scheduler.counters.num_preemptions > 0) == ("num_blocks" in options)


@pytest.mark.parametrize("num_blocks", [pytest.param(400, marks=pytest.mark.slow), 12, 2])
def test_a_draft_without_sense_or_without_blocks_changes_nothing(start, plain, other, num_blocks):
    model = draft(other, num_blocks)
    run = start(model)
    assert_same(answers(run), plain)
    assert (accepted(run)[0] > 0) == (num_blocks > 2)  # no sequence fits into two


def test_several_sequences_are_guessed_in_one_round(start):
    model = draft()
    sizes: list[int] = []
    execute = model._runner.execute

    def counted(plan: StepPlan) -> StepResult:
        sizes.append(sum(len(item.samples) for item in plan.sequences))
        return execute(plan)

    model._runner.execute = counted  # type: ignore[method-assign]
    run = start(model)
    run.generate(*PROMPTS[:4], max_tokens=LENGTH)
    assert max(sizes) == 4


def test_a_request_says_whether_and_how_far_the_draft_guesses(start, plain):
    run = start(draft())
    off = [{**way, "speculation": Speculation("ngram")} for way in WAYS]
    assert_same(answers(run, off), plain)
    assert accepted(run) == (0, 0)
    assert_same(answers(run, [{**WAYS[0], "speculation": Speculation("draft", 1)}]), plain[:1])
    num_guesses, num_accepted = accepted(run)
    assert num_accepted == num_guesses > 0


def test_a_handed_over_answer_is_the_same_and_the_prefill_side_guesses_nothing(start, plain):
    prefill, decode = start(draft()), start(draft())
    for prompt, way, (expected, _) in zip(PROMPTS, WAYS, plain, strict=True):
        assert hand_off(prefill, decode, prompt, LENGTH, **way) == ids(expected)
    assert accepted(prefill) == (0, 0)
    assert accepted(decode)[1] > 0


def test_an_answer_that_goes_on_elsewhere_is_the_same(start, plain):
    run = start(draft())
    for prompt, way, (expected, _) in zip(PROMPTS, WAYS, plain, strict=True):
        kept = ids(expected)[: len(expected) // 2]
        assert [*kept, *run.continued(prompt, kept, LENGTH, **{**way, "prompt_logprobs": None})] == ids(expected)


def test_a_prefix_that_the_draft_has_is_not_computed_again(start):
    model = draft()
    run = start(model)
    prompt = PROMPTS[8]
    first = run.generate(prompt, max_tokens=LENGTH)
    assert model.pool.num_cached >= len(prompt) // BLOCK_SIZE
    assert run.generate([*prompt], max_tokens=LENGTH) == first


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), num_guesses=st.sampled_from([None, 1, 3, MOST_GUESSES]))
def test_any_draft_changes_nothing(start, plain, seed, num_guesses):
    """One that is right, wrong or broken from token to token."""
    model = draft()
    inner = model._runner

    class Twisted:
        is_async = False

        def execute(self, plan: StepPlan) -> StepResult:
            result = inner.execute(plan)
            sampled = tuple(
                found if seed >> place % 32 & 1 else SampledToken(seed * (place + 7) % 3072, -0.1)
                for place, found in enumerate(result.sampled)
            )
            return StepResult(sampled)

    model._runner = Twisted()
    run = start(model, num_guesses)
    assert_same(answers(run), plain)
    run.close()


@pytest.mark.parametrize("way", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_in_deterministic_bf16_answers_are_the_same_to_the_bit(start, way):
    options = {"dtype": torch.bfloat16, "kv_dtype": "bfloat16", "deterministic": True}
    ways = [WAYS[way], {**WAYS[0]}]
    assert answers(start(draft(dtype=torch.bfloat16), **options), ways) == answers(start(**options), ways)


def test_beside_other_guesses_the_draft_changes_nothing(start, plain):
    model = draft()
    run = start(model)
    run.scheduler._speculator._drafters = [NgramDrafter()]
    assert_same(answers(run), plain)
    assert all(count > 0 for count in map(run.scheduler._speculator.counters.num_guesses.get, ("ngram", "draft")))


@pytest.mark.parametrize("how", [{}, AS_ON_GPUS], ids=["one pool", "as on GPUs"])
def test_the_leader_of_a_group_asks_a_draft_and_changes_no_answer(tmp_path: Path, how: dict[str, Any]) -> None:
    folder, prompts = write_family(tmp_path, "Qwen3ForCausalLM"), [PROMPTS[1], PROMPTS[4]]
    prompts = [[token % 211 for token in prompt] for prompt in prompts]
    with EngineRun(folder) as run:
        expected = run.generate(*prompts, max_tokens=LENGTH)
    decoder = load_draft(folder, torch.float32, load_config(folder).vocab_size)
    model = open_draft(decoder, draft_layout(decoder, BLOCK_SIZE), 60, 8)
    model.is_queued = bool(how)
    with GroupRun(folder, Degrees(2), speculator=Speculator([], 3, model), **how) as run:
        assert run.generate(*prompts, max_tokens=LENGTH) == expected
        assert accepted(run)[1] > 0


def test_a_draft_of_another_vocabulary_is_refused_with_both_numbers(tmp_path: Path):
    write_random_checkpoint(tmp_path, vocab_size=300)
    with pytest.raises(ConfigError, match=r"vocabulary of 300 tokens, the model has 3072") as refused:
        load_draft(tmp_path, torch.float32, 3072)
    assert refused.value.field == "draft"
    with pytest.raises(ModelLoadError):
        load_draft(tmp_path / "missing", torch.float32, 3072)


def test_a_pool_that_is_too_large_is_refused_at_the_start():
    decoder = load_draft(DEMO, torch.float32, load_config(DEMO).vocab_size)
    with pytest.raises(ConfigError):
        open_draft(decoder, draft_layout(decoder, BLOCK_SIZE), 10**9, 16)
