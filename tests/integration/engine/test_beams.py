"""Beam search, fp32: the answers of transformers, alone, in a crowd, handed over, out of blocks and out of places."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch

from shared.engine.messages import AbortSequence, AddSequence, BeamAnswer, EngineLoad, StepOutput
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sampling_params import BeamSearch
from shared.errors import InvalidRequest
from shared.model.ranks.shard import Degrees
from tests.demo import DEMO
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.families import write_family
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import load_transformers
from tests.unit.collectives.in_threads import needs_library

PROMPT = [7 + (i * 37) % 190 for i in range(45)]
NUM_TOKENS = 24
STOPPING: dict[str, bool | str] = {"false": False, "true": True, "never": "never"}


def transformers_beams(folder: Path, prompt: list[int], search: BeamSearch, ends: list[int]) -> list[list[int]]:
    """Best first, up to their ends."""
    return [list(answer) for answer in _answers(folder, tuple(prompt), search, tuple(ends))]


@cache
def _answers(folder: Path, prompt: tuple[int, ...], search: BeamSearch, ends: tuple[int, ...]) -> list[list[int]]:
    model, tokens = load_transformers(folder), torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_TOKENS, do_sample=False,
            num_beams=search.width, num_return_sequences=search.num_answers, length_penalty=search.length_penalty,
            early_stopping=STOPPING[search.early_stopping], eos_token_id=list(ends) or None,
            pad_token_id=(ends or (0,))[0],
        )  # fmt: skip
    answers = []
    for row in output[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:end])
    return answers


def found(run: EngineRun, name: str) -> tuple[BeamAnswer, ...]:
    while True:
        for token in run.next(StepOutput).tokens:
            if token.sequence_id == name and token.finish_reason is not None:
                return token.beams


def search_in(run: EngineRun, prompt: list[int], search: BeamSearch) -> list[list[int]]:
    sequence = run.sequence(prompt, NUM_TOKENS, beams=search)
    run.engine.submit(AddSequence(sequence))
    return [list(answer.token_ids) for answer in found(run, sequence.sequence_id)]


def ends_of(folder: Path) -> list[int]:
    """A token that comes early in the likeliest answer, and one that another one has: some answers end, some do not."""
    answers = transformers_beams(folder, PROMPT, BeamSearch(4, 4), [])
    return sorted({answers[0][7], answers[3][11]})


def left_clean(run: EngineRun) -> None:
    run.end()


@pytest.fixture(
    scope="module",
    params=["demo", "qwen3-next", *(pytest.param(x, marks=pytest.mark.slow) for x in ("LlamaForCausalLM", "gpt-oss"))],
)
def folder(request, tmp_path_factory):
    if request.param == "demo":
        return DEMO
    return write_family(tmp_path_factory.mktemp("model") / "model", request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("model") / "model", "LlamaForCausalLM")


OTHERS = [[5 + (i * k) % 200 for i in range(9 + 3 * k)] for k in range(1, 3)]


@pytest.fixture(scope="module")
def others_alone(plain):
    """Greedy answers to OTHERS, one by one and with room for all."""
    with EngineRun(plain, max_num_batched_tokens=64) as roomy:
        return [roomy.generate(prompt, max_tokens=NUM_TOKENS)[0] for prompt in OTHERS]


@pytest.mark.parametrize(
    "search",
    [BeamSearch(4, 4), BeamSearch(3, 1, 0.6, "true"), BeamSearch(4, 2, 2.0, "never"), BeamSearch(1, 1)],
    ids=lambda search: f"{search.width}-{search.early_stopping}",
)
def test_the_answers_are_those_of_transformers(folder, search):
    ends = ends_of(folder)
    for given in ([], ends):
        with EngineRun(folder, eos=frozenset(given), max_num_batched_tokens=64) as run:
            assert search_in(run, PROMPT, search) == transformers_beams(folder, PROMPT, search, given)
        left_clean(run)


@pytest.mark.parametrize("length", [45, 48])  # 48: whole blocks, of which the last one is shared
def test_handed_over_behind_its_own_prefix_and_damaged_the_answers_are_the_same(folder, length):
    prompt, search = PROMPT[:3] + PROMPT[: length - 3], BeamSearch(4, 4)
    expected = transformers_beams(folder, prompt, search, [])
    with EngineRun(folder) as prefill, EngineRun(folder) as decode:
        names: list[list[list[int]]] = []
        decode.collect = lambda ids: [[list(answer.token_ids) for answer in found(decode, ids[0])]]  # type: ignore[method-assign]
        for corrupt in (None, None, 1):
            if corrupt is not None:
                decode.pool.clear_cache()
            names.append(hand_off(prefill, decode, prompt, NUM_TOKENS, corrupt, beams=search)[1:])
        assert names == [expected] * 3
    left_clean(decode)
    left_clean(prefill)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "num_host_blocks", "max_num_seqs"), [(64, 0, 8), (9, 0, 8), (9, 64, 8), (5, 0, 8), (64, 0, 2)]
)
def test_among_others_out_of_blocks_and_out_of_places(
    plain, others_alone, num_blocks, num_host_blocks, max_num_seqs, ahead
):
    searches = [BeamSearch(4, 4), BeamSearch(3, 2, 0.0)]
    expected = [transformers_beams(plain, PROMPT[i:], search, []) for i, search in enumerate(searches)]
    run = EngineRun(
        plain, num_blocks=num_blocks, max_num_batched_tokens=32, config=RunnerConfig(max_num_seqs=max_num_seqs),
        ahead=ahead, num_host_blocks=num_host_blocks,
    )  # fmt: skip
    try:
        beams = [run.sequence(PROMPT[i:], NUM_TOKENS, beams=search) for i, search in enumerate(searches)]
        greedy = [run.sequence(prompt, NUM_TOKENS) for prompt in OTHERS]
        for item in (beams[0], greedy[0], beams[1], greedy[1]):
            run.engine.submit(AddSequence(item))
        tokens: dict[str, list[int]] = {item.sequence_id: [] for item in greedy}
        answers: dict[str, list[list[int]]] = {}
        ended: set[str] = set()
        while len(ended) < 4:
            for token in run.next(StepOutput).tokens:
                tokens.setdefault(token.sequence_id, []).append(token.token.token_id)
                if token.finish_reason is not None:
                    ended.add(token.sequence_id)
                    answers[token.sequence_id] = [list(answer.token_ids) for answer in token.beams]
    finally:
        run.close()
    assert [tokens[item.sequence_id] for item in greedy] == others_alone
    assert [answers[item.sequence_id] for item in beams] == expected
    left_clean(run)


def test_full_blocks_are_shared_and_only_the_last_one_is_copied(plain):
    search = BeamSearch(4, 4)
    run = EngineRun(plain, num_blocks=64, max_num_batched_tokens=64, ahead=False)
    plans, used = [], []
    launch = run.runner.launch
    run.runner.launch = lambda plan: (plans.append(plan), used.append(run.pool.num_used), launch(plan))[2]  # type: ignore[method-assign]
    prompt = [7 + (i * 37) % 190 for i in range(37 * 16)]
    try:
        search_in(run, prompt, search)
    finally:
        run.close()
    assert plans[0].num_tokens > 0
    copies = [copy for plan in plans for copy in plan.copies]
    assert copies
    assert all(copy.source_id is not None for copy in copies)
    assert max(used) <= 37 + 4 * 2, "each beam has the blocks of its own answer, and the prompt's are one"
    answering = [plan for plan in plans if all(item.start >= len(prompt) for item in plan.sequences)]
    assert sum(plan.num_tokens for plan in answering) == 4 * (NUM_TOKENS - 1), "nothing is computed twice"


def test_a_cancelled_search_leaves_nothing(plain):
    run = EngineRun(plain, num_blocks=9)
    try:
        items = [run.sequence(PROMPT, NUM_TOKENS * 2, beams=BeamSearch(4, 4)) for _ in range(2)]
        for item in items:
            run.engine.submit(AddSequence(item))
        while not any(token.sequence_id == items[0].sequence_id for token in run.next(StepOutput).tokens):
            pass
        for item in items:
            run.engine.submit(AbortSequence(item.sequence_id))
        while True:
            load = run.next(EngineLoad)
            if load.num_running == load.num_waiting == 0 and load.num_free_blocks == 9:
                break
    finally:
        run.close()
    left_clean(run)


def test_more_ends_than_a_step_tells_of_are_refused(plain):
    with EngineRun(plain) as run:
        item = run.sequence(PROMPT, 4, beams=BeamSearch(10, 1), stop_token_ids=tuple(range(12)))
        run.engine.submit(AddSequence(item))
        with pytest.raises(InvalidRequest, match="at most 8 beams"):
            found(run, item.sequence_id)


@needs_library
def test_blocks_of_a_pool_that_ranks_share_are_copied_once(tmp_path: Path) -> None:
    """By the leader: forks' last blocks, and those that go to host memory and come back."""
    folder = write_family(tmp_path / "model", "LlamaForCausalLM")
    search = BeamSearch(4, 4)
    prompts = [PROMPT[i : i + 20 + 9 * i] for i in range(4)]
    with closing(EngineRun(folder)) as alone:
        expected = alone.generate(*prompts, max_tokens=40)
    run = GroupRun(folder, Degrees(2), num_blocks=12, max_num_batched_tokens=17, num_host_blocks=8)
    assert run.generate(*prompts, max_tokens=40) == expected
    assert run.scheduler.counters.num_swapped_out > 0
    for _ in range(3):
        assert search_in(run, PROMPT, search) == transformers_beams(folder, PROMPT, search, [])
    left_clean(run)
