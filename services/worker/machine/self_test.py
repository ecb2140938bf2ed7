"""Self-test before a worker serves: the model must answer a fixed prompt twice with the same tokens."""

from __future__ import annotations

import torch

from shared.engine.runner.runner import Runner
from shared.engine.sampling_params import SamplingParams
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import Internal
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool

NUM_PROMPT_TOKENS = 7
NUM_OUTPUT_TOKENS = 8
"""Prompt and answer fit into one block of the smallest size."""


def self_test(runner: Runner, groups: KVGroups, vocab_size: int) -> None:
    """Answers the prompt greedily, twice, each time over an empty pool; leaves no trace in the worker's own.

    Blocking; for a runner that was started and has no step under way. Raises NumericalFault for logits that are not
    finite, Internal where the answers differ.
    """
    prompt = [(1 + 37 * place) % vocab_size for place in range(NUM_PROMPT_TOKENS)]
    with torch.inference_mode():
        first, second = (_answer(runner, groups, prompt) for _ in range(2))
    if first != second:
        raise Internal(f"the self-test's prompt has two answers: tokens {first}, then {second}")


def _answer(runner: Runner, groups: KVGroups, prompt: list[int]) -> list[int]:
    pool = BlockPool(2 * groups.size, groups.block_size)
    scheduler = Scheduler(pool, SchedulerConfig(max_num_seqs=1), groups=groups)
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_OUTPUT_TOKENS)
    total = len(prompt) + NUM_OUTPUT_TOKENS
    scheduler.add(
        EngineSequence(
            "self-test", list(prompt), len(prompt), sampling, b"self-test", Goal.COMPLETION, total, frozenset()
        )
    )
    tokens: list[int] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        output = scheduler.apply(plan, runner.launch(plan).result())
        tokens += [new.token.token_id for new in output.tokens]
        for failed in scheduler.take_failed():
            raise failed.error
    return tokens
