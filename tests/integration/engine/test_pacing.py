"""Chunks by time change when a prompt is computed, and no token."""

from __future__ import annotations

import pytest

from shared.engine.messages import AddSequence, EngineLoad, StepOutput
from shared.engine.runner.runner import RunnerConfig
from tests.integration.engine.engine_run import EngineRun
from tests.integration.engine.families import write_family
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy

LONG = [7 + (3 * i) % 190 for i in range(150)]
SHORT = [[5 + (i * k) % 200 for i in range(6 + k)] for k in range(1, 4)]
NUM_TOKENS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_in_chunks_by_time_give_the_tokens_of_transformers(folder, ahead):
    """The target is far below what any step takes, so the answers are late and chunks are as small as may be."""
    expected = [transformers_greedy(folder, prompt, NUM_TOKENS) for prompt in (*SHORT, LONG, LONG[:90])]
    config = RunnerConfig(max_num_seqs=8, max_seq_len=256)
    run = EngineRun(folder, 128, 128, config=config, ahead=ahead, tpot_target_s=1e-5, itl_target_s=2e-5)
    run.scheduler._batch_limit.target_s = 0.0  # all may run at once: here it is about chunks
    launched = []
    launch = run.runner.launch
    run.runner.launch = lambda plan: (launched.append(plan), launch(plan))[1]
    try:
        assert run.generate(*SHORT, max_tokens=NUM_TOKENS) == expected[: len(SHORT)]
        del launched[:]
        sequences = [run.sequence(prompt, NUM_TOKENS) for prompt in (*SHORT, LONG, LONG[:90])]
        found, loads = {item.sequence_id: [] for item in sequences}, []
        for item in sequences[:3]:
            run.engine.submit(AddSequence(item))
        left, begun = len(sequences), False
        while left:
            event = run.next(StepOutput, EngineLoad)
            if isinstance(event, EngineLoad):
                loads.append(event)
                continue
            for token in event.tokens:
                found[token.sequence_id].append(token.token.token_id)
                left -= token.finish_reason is not None
            if not begun and all(len(found[item.sequence_id]) > 3 for item in sequences[:3]):
                begun = True
                for item in sequences[3:]:
                    run.engine.submit(AddSequence(item))
    finally:
        run.close()
    assert list(found.values()) == expected
    mixed = [plan for plan in launched if plan.num_prefill_tokens and plan.num_tokens > plan.num_prefill_tokens]
    assert mixed
    assert max(plan.num_prefill_tokens for plan in mixed) < 128, "the budget alone would have been larger"
    assert any(load.step_times is not None and load.decoding.num_sequences for load in loads)
    assert any(load.least_slack_s is not None and load.least_slack_s < 0 for load in loads)
    run.scheduler.check_integrity()
