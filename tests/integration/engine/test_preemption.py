"""Sequences that lie in host memory for a while produce the tokens of the undisturbed run, without being recomputed."""

from __future__ import annotations

import threading

import pytest

from shared.engine.messages import AbortSequence, AddSequence, EngineLoad, JoinSequence, StepOutput
from shared.engine.runner.runner import RunnerConfig
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun, hand_off
from tests.integration.engine.families import write_family
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.waiting import DEADLINE_S

PROMPTS = [[5 + (i * k) % 200 for i in range(9 + 4 * k)] for k in range(1, 6)]
NUM_TOKENS = 60
TIGHT = 12
"""Blocks: two of these sequences at their end, all five at their start."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def expected(folder):
    return [transformers_greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("num_host_blocks", [5, 64])
def test_moved_sequences_give_the_tokens_of_transformers(folder, expected, num_host_blocks, static, ahead):
    config = RunnerConfig(max_num_seqs=5, max_seq_len=160, static_decode=static)
    with EngineRun(folder, num_blocks=TIGHT, config=config, ahead=ahead, num_host_blocks=num_host_blocks) as run:
        found = run.generate(*PROMPTS, max_tokens=NUM_TOKENS)
    counters = run.scheduler.counters
    assert found == expected
    assert counters.num_swapped_in == counters.num_swapped_out > 0
    assert (counters.num_swapped_out < counters.num_preemptions) == (num_host_blocks == 5)
    run.scheduler.check_integrity()
    assert run.pool.num_used == 0


def test_with_room_in_host_memory_no_token_is_computed_twice(folder, expected):
    run = EngineRun(folder, num_blocks=TIGHT, ahead=False, num_host_blocks=64)
    launched = []
    launch = run.runner.launch
    run.runner.launch = lambda plan: (launched.append(plan), launch(plan))[1]
    try:
        assert run.generate(*PROMPTS, max_tokens=NUM_TOKENS) == expected
    finally:
        run.close()
    assert run.scheduler.counters.num_preemptions > 0
    computed = sum(plan.num_tokens for plan in launched)
    assert computed == sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
    out = sum(copy.to_host for plan in launched for copy in plan.copies)
    back = sum(not copy.to_host for plan in launched for copy in plan.copies)
    assert 0 < back < out, "what survived in the pool is not copied back"


def step_by_step_until_joined(run: EngineRun) -> None:
    """Each command lets the engine take one step, so that what runs is still running when another sequence joins it,
    however long its hand-off takes."""
    commanded, joined = threading.Event(), threading.Event()
    submit, launch = run.engine.submit, run.runner.launch

    def note(command) -> None:
        submit(command)
        if isinstance(command, JoinSequence):
            joined.set()
        commanded.set()

    def wait(plan):
        assert commanded.wait(DEADLINE_S)
        if not joined.is_set():
            commanded.clear()
        return launch(plan)

    run.engine.submit, run.runner.launch = note, wait


def test_a_handed_off_sequence_is_moved_out_and_back_as_well(folder, expected):
    with EngineRun(folder) as prefill, EngineRun(folder, num_blocks=9, num_host_blocks=64) as decode:
        step_by_step_until_joined(decode)
        older = decode.sequence(PROMPTS[2], NUM_TOKENS)
        decode.engine.submit(AddSequence(older))
        younger = hand_off(prefill, decode, PROMPTS[3], max_tokens=NUM_TOKENS)
        swapped = decode.scheduler.counters.num_swapped_in
    assert younger == expected[3]
    assert swapped > 0


def test_a_request_cancelled_in_host_memory_leaves_nothing_there(folder):
    run = EngineRun(folder, num_blocks=TIGHT, num_host_blocks=64)
    names = []
    try:
        for prompt in PROMPTS:
            item = run.sequence(prompt, NUM_TOKENS)
            names.append(item.sequence_id)
            run.engine.submit(AddSequence(item))
        while run.next(EngineLoad).num_swapped_out == 0:
            pass
        for name in names:
            run.engine.submit(AbortSequence(name))
        while True:
            load = run.next(EngineLoad)
            if load.num_running == load.num_waiting == 0:
                break
    finally:
        run.close()
    assert load.num_free_blocks == TIGHT
    assert load.num_growth_blocks == 0
    run.scheduler.check_integrity()


def test_a_time_target_changes_no_token(folder, expected):
    """No step is as fast as the target: a batch is bounded by twice the step of one answer (`test_batch_limit`)."""
    with EngineRun(folder, num_blocks=64, tpot_target_s=1e-6) as run:
        warm = run.generate(PROMPTS[0], max_tokens=NUM_TOKENS)
        sequences = [run.sequence(prompt, NUM_TOKENS) for prompt in PROMPTS]
        for item in sequences:
            run.engine.submit(AddSequence(item))
        found, left = {item.sequence_id: [] for item in sequences}, len(sequences)
        while left:
            for token in run.next(StepOutput).tokens:
                found[token.sequence_id].append(token.token.token_id)
                left -= token.finish_reason is not None
    assert warm == expected[:1]
    assert list(found.values()) == expected


def test_prompts_longer_than_the_pool_are_refused_whatever_host_memory_holds(folder):
    from shared.errors import PromptTooLong

    with EngineRun(folder, num_blocks=4, num_host_blocks=64) as run, pytest.raises(PromptTooLong):
        run.generate([5] * (4 * BLOCK_SIZE), max_tokens=1)
