"""In deterministic mode an answer and its log-probabilities are the same to the bit, whatever happens around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.messages import AddSequence, StepOutput
from shared.engine.plan import SampledToken
from shared.engine.runner.runner import RunnerConfig
from shared.kernels.backends.registry import AUTO
from shared.model.checkpoints import write_random_checkpoint
from tests.demo import DEMO
from tests.unit.kernels.isas import ISAS, needs_library

from .engine_run import EngineRun, hand_off

pytestmark = needs_library

NUM_TOKENS = 40
PROMPTS = [[5 + (i * (2 * k + 3)) % 2000 for i in range(21 + 17 * k)] for k in range(12)]
ASKED = (1, 7)
"""Prompts whose answers are compared: of 38 and of 140 tokens."""
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    {"temperature": 0.7, "top_k": 40, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]


@contextmanager
def running(num_blocks: int = 400, tokens: int = 512, kernels: str = AUTO, **options: Any) -> Iterator[EngineRun]:
    with EngineRun(
        options.pop("folder", DEMO),
        num_blocks,
        tokens,
        kernels=kernels,
        config=RunnerConfig(max_num_seqs=len(PROMPTS)),
        dtype=torch.bfloat16,
        kv_dtype="bfloat16",
        deterministic=options.pop("deterministic", True),
        **options,
    ) as run:
        yield run


def answers(run: EngineRun, numbers: tuple[int, ...], sampling: dict[str, Any]) -> dict[int, list[SampledToken]]:
    """Each prompt's tokens with their log-probabilities, of prompts that run together."""
    found: dict[str, list[SampledToken]] = {}
    names = {}
    for number in numbers:
        item = run.sequence(PROMPTS[number], NUM_TOKENS, logprobs=3, ignore_eos=True, **sampling)
        names[number], found[item.sequence_id] = item.sequence_id, []
        run.engine.submit(AddSequence(item))
    while any(len(tokens) < NUM_TOKENS for tokens in found.values()):
        for token in run.next(StepOutput).tokens:
            found[token.sequence_id].append(token.token)
    return {number: found[name] for number, name in names.items()}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SAMPLING[0], marks=pytest.mark.slow, id="greedy"),
        pytest.param(SAMPLING[1], id="seeded"),
        pytest.param(SAMPLING[2], marks=pytest.mark.slow, id="penalties"),
    ],
)
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def alone(sampling: dict[str, Any]) -> dict[int, list[SampledToken]]:
    """Each prompt in an engine of its own, in one chunk."""
    found = {}
    for number in ASKED:
        with running() as run:
            found |= answers(run, (number,), sampling)
    return found


def assert_same(found: dict[int, list[SampledToken]], alone: dict[int, list[SampledToken]]) -> None:
    for number, tokens in alone.items():
        assert found[number] == tokens


ALL = tuple(range(len(PROMPTS)))


def test_in_a_batch_of_twelve(alone, sampling):
    with running() as run:
        assert_same(answers(run, ALL, sampling), alone)


@pytest.mark.parametrize("chunk", [16, 33, 100])
def test_in_chunks_beside_running_answers(alone, sampling, chunk):
    with running(tokens=chunk) as run:
        assert_same(answers(run, ALL, sampling), alone)


def test_behind_a_prefix_that_was_computed_before(alone, sampling):
    with running() as run:
        answers(run, ASKED, sampling)
        before = run.scheduler.counters.num_prefix_hit_tokens
        assert_same(answers(run, ASKED, sampling), alone)
        assert run.scheduler.counters.num_prefix_hit_tokens > before


def test_launched_ahead_of_the_last_token(alone, sampling):
    with running(ahead=True) as run:
        assert_same(answers(run, ALL, sampling), alone)


@pytest.mark.parametrize("num_host_blocks", [0, 400], ids=["recomputed", "moved to host memory"])
def test_preempted(alone, sampling, num_host_blocks):
    with running(num_blocks=40, num_host_blocks=num_host_blocks) as run:
        assert_same(answers(run, ALL, sampling), alone)
        counters = run.scheduler.counters
        assert counters.num_preemptions > 0
        assert (counters.num_swapped_in > 0) == (num_host_blocks > 0)


def test_handed_off_to_another_worker(alone, sampling):
    with running(tokens=48) as prefill, running() as decode:
        for number in ASKED:
            tokens = hand_off(prefill, decode, PROMPTS[number], NUM_TOKENS, ignore_eos=True, **sampling)
            assert tokens == [token.token_id for token in alone[number]]


def test_continued_elsewhere_from_its_tokens(alone, sampling):
    """As after a decode worker's death: prompt and answer so far are computed again, as a prompt."""
    for number in ASKED:
        given = [token.token_id for token in alone[number]]
        for kept in (1, 13):
            with running() as run:
                continued = run.continued(PROMPTS[number], given[:kept], NUM_TOKENS, ignore_eos=True, **sampling)
                assert continued == given[kept:]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_with_every_instruction_set(tmp_path: Path, isa: str) -> None:
    write_random_checkpoint(
        tmp_path, "Qwen3ForCausalLM", hidden_size=96, intermediate_size=160, head_dim=32, vocab_size=2100
    )
    found = []
    for numbers, chunk in ((ASKED, 512), (ALL[:9], 33)):
        with running(folder=tmp_path, kernels=f"cpu:{isa}", tokens=chunk) as run:
            found.append(answers(run, numbers, {"temperature": 0.0}))
    assert_same(found[1], found[0])


@pytest.mark.slow
def test_without_the_mode_log_probabilities_depend_on_the_batch() -> None:
    """So the tests above can fail. With AVX2, which every processor with the library has: pairs of bf16 happen to sum
    alike in any batch."""
    found = []
    for numbers in ((1,), ALL):
        with running(deterministic=False, kernels="cpu:avx2") as run:
            found.append(answers(run, numbers, {"temperature": 0.0})[1])
    assert [token.logprob for token in found[0]] != [token.logprob for token in found[1]]
