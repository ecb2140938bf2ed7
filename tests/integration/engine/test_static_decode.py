"""Static padded decode, prompts in padded pieces, and steps launched ahead, give the tokens of the plain way."""

from __future__ import annotations

import pytest

from shared.engine.messages import AddSequence, StepOutput
from shared.engine.runner.runner import RunnerConfig
from tests.integration.engine.engine_run import EngineRun
from tests.integration.engine.families import write_family

PROMPTS = [[5 + (i * k) % 200 for i in range(14 + 9 * k)] for k in range(1, 6)]
WAYS = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 12, "logprobs": 2},
    {"min_tokens": 4, "stop_token_ids": (9, 30, 31), "logprobs": 0},
    {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "bad_sequences": ((9, 30), (7,)),
        "seed": 5,
    },
    {"temperature": 1.1, "top_k": 7, "min_p": 0.02, "seed": 2**63 + 1},
]
"""One a prompt: greedy and sampled rows, some that the static step cannot finish alone."""


def run_all(folder, *, ways=WAYS, num_tokens=26, **settings):
    """What each prompt produced, as SampledTokens, all in one batch."""
    with EngineRun(folder, **settings) as run:
        sequences = [run.sequence(p, num_tokens, **way) for p, way in zip(PROMPTS, ways, strict=True)]
        for item in sequences:
            run.engine.submit(AddSequence(item))
        found = {item.sequence_id: [] for item in sequences}
        left = set(found)
        while left:
            for token in run.next(StepOutput).tokens:
                found[token.sequence_id].append(token.token)
                if token.finish_reason:
                    left.discard(token.sequence_id)
    run.scheduler.check_integrity()
    assert run.pool.num_used == 0
    return list(found.values()), run.scheduler.counters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(scope="module", params=["torch", "auto"])
def plain(request, folder):
    return request.param, run_all(folder, kernels=request.param)[0]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 10])
def test_every_way_to_run_steps_gives_the_same_tokens(folder, plain, static, ahead, num_blocks):
    kernels, expected = plain
    config = RunnerConfig(max_num_seqs=5, max_seq_len=128, static_decode=static)
    found, counters = run_all(folder, num_blocks=num_blocks, kernels=kernels, config=config, ahead=ahead)
    assert (counters.num_preemptions > 0) == (num_blocks == 10)
    for ours, theirs in zip(found, expected, strict=True):
        assert [t.token_id for t in ours] == [t.token_id for t in theirs]
        assert [t.logprob for t in ours] == pytest.approx([t.logprob for t in theirs], abs=1e-4)
        assert [[i for i, _ in t.top] for t in ours] == [[i for i, _ in t.top] for t in theirs]


@pytest.mark.parametrize("static", [False, True])
def test_prompts_and_mixed_steps_in_pieces_give_the_same_tokens(folder, plain, static):
    kernels, expected = plain
    # Steps have 24 tokens at most: some are run in pieces, some are too long for that.
    config = RunnerConfig(max_num_seqs=5, max_seq_len=128, static_decode=static, piecewise_tokens=20)
    found, counters = run_all(folder, num_blocks=10, kernels=kernels, config=config, ahead=True)
    assert counters.num_preemptions > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert [t.token_id for t in ours] == [t.token_id for t in theirs]
        assert [t.logprob for t in ours] == pytest.approx([t.logprob for t in theirs], abs=1e-4)


def test_lengths_of_dynamic_rope_reach_static_steps_and_pieces(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 24}
    folder = write_family(tmp_path, "LlamaForCausalLM", rope=rope)
    greedy = [{}] * len(PROMPTS)
    expected, _ = run_all(folder, ways=greedy)
    for config in (
        RunnerConfig(max_num_seqs=5, static_decode=True),
        RunnerConfig(max_num_seqs=5, piecewise_tokens=24),
    ):
        found = run_all(folder, ways=greedy, config=config, ahead=True)[0]
        assert [[t.token_id for t in ours] for ours in found] == [[t.token_id for t in each] for each in expected]


def test_states_are_read_and_written_by_every_way(tmp_path):
    folder = write_family(tmp_path, "qwen3-next")
    greedy = [{}] * len(PROMPTS)
    expected, _ = run_all(folder, ways=greedy)
    static = RunnerConfig(max_num_seqs=5, max_seq_len=128, static_decode=True)
    pieces = RunnerConfig(max_num_seqs=5, max_seq_len=128, static_decode=True, piecewise_tokens=20)
    for config, kernels in ((static, "torch"), (static, "auto"), (pieces, "auto")):
        found, _ = run_all(folder, ways=greedy, config=config, kernels=kernels, ahead=True)
        assert [[t.token_id for t in ours] for ours in found] == [[t.token_id for t in each] for each in expected]


def test_an_eager_step_may_follow_static_ones_that_began(folder):
    """As on a decode worker, whose sequences join with their KV: its first step is a static one."""
    tokens = {}
    for static in (False, True):
        config = RunnerConfig(max_num_seqs=5, max_seq_len=128, static_decode=static)
        with EngineRun(folder, config=config, ahead=True) as run:
            first = run.sequence([7], 40)
            run.engine.submit(AddSequence(first))
            begun = [token.token.token_id for token in run.next(StepOutput).tokens]
            second = run.sequence(PROMPTS[0], 5)
            run.engine.submit(AddSequence(second))
            rest = run.collect([first.sequence_id, second.sequence_id])
        tokens[static] = [begun + rest[0], rest[1]]
    assert tokens[True] == tokens[False]
