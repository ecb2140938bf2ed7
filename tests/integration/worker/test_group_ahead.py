"""Ranks in processes of their own whose steps are launched ahead, as on GPUs, answer as one process does."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from services.worker import host
from services.worker.host import EngineHost
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.engine.engine import Engine
from shared.engine.messages import AddSequence, EngineDied, Event, SequenceFailed, StepOutput
from shared.engine.plan import StepPlan
from shared.engine.runner.runner import Runner
from shared.engine.runner.sampler import PendingStep
from shared.engine.sampling_params import SamplingParams
from shared.engine.scheduler.scheduler import Scheduler
from shared.engine.sequence import EngineSequence, Goal
from tests.unit.collectives.in_threads import needs_library
from tests.waiting import DEADLINE_S

pytestmark = needs_library

OVER_TCP = ("--collectives", "gloo", "--group-pool", "own")
GROUPS = [("--tp", "2", *OVER_TCP), ("--pp", "2", *OVER_TCP), ("--tp", "2"), ("--tp", "2", "--pp", "2", *OVER_TCP)]
PROMPTS = [[5 + (i * k) % 200 for i in range(14 + 9 * k)] for k in range(1, 5)]
NUM_TOKENS = 50
WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 12},
    {"temperature": 0.7, "repetition_penalty": 1.3, "bad_sequences": ((9, 30), (7,)), "seed": 5},
    {"temperature": 1.1, "top_k": 7, "seed": 3},
]


def settings(*flags: str) -> WorkerSettings:
    always = ("--name", "d0", "--bind", "127.0.0.1:0", "--model", "models/demo", "--dtype", "fp32")
    sizes = ("--num-threads", "2", "--num-kv-blocks", "64", "--max-model-len", "256")
    return load_settings(
        WorkerSettings, [*always, *sizes, "--max-num-batched-tokens", "64", "--max-num-seqs", "8", *flags]
    )


async def answers(*flags: str) -> dict[str, list[int]]:
    """Of all ways in one batch."""
    engine_host = EngineHost(settings(*flags))
    events: asyncio.Queue[Event] = asyncio.Queue()
    found: dict[str, list[int]] = {}
    try:
        engine_host.listen(events.put_nowait)
        await engine_host.start(lambda *_: None)
        for number, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True)):
            params = SamplingParams(**{"seed": 0, "max_tokens": NUM_TOKENS, **way})  # type: ignore[arg-type]
            sequence = EngineSequence(
                f"s{number}", list(prompt), len(prompt), params, b"root-of-a-model!", Goal.COMPLETION,
                len(prompt) + NUM_TOKENS, frozenset(),
            )  # fmt: skip
            found[sequence.sequence_id] = []
            engine_host.engine.submit(AddSequence(sequence))
        left = set(found)
        async with asyncio.timeout(DEADLINE_S):
            while left:
                event = await events.get()
                assert not isinstance(event, (EngineDied, SequenceFailed)), event
                for token in event.tokens if isinstance(event, StepOutput) else ():
                    found[token.sequence_id].append(token.token.token_id)
                    if token.finish_reason:
                        left.discard(token.sequence_id)
    finally:
        await engine_host.close()
    return found


@pytest.mark.parametrize(
    "flags", [GROUPS[0], *(pytest.param(flags, marks=pytest.mark.slow) for flags in GROUPS[1:])], ids=str
)
async def test_ranks_in_processes_answer_as_one_process(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    for taken in ("take_share", "take_cores"):  # the leader is this process, which other tests need as it was
        monkeypatch.setattr(host, taken, lambda *_: None)
    num_pending: list[int] = []

    def running_ahead(scheduler: Scheduler, runner: Runner, *rest: Any, **more: Any) -> Engine:
        launch = runner.launch

        def noted(plan: StepPlan) -> PendingStep:
            num_pending.append(sum(item.pending is not None for item in plan.sequences))
            return launch(plan)

        runner.launch = noted  # type: ignore[method-assign]
        return Engine(scheduler, runner, *rest, **more, ahead=True)

    monkeypatch.setattr(host, "Engine", partial(Engine, ahead=False))
    alone = await answers()
    monkeypatch.setattr(host, "Engine", running_ahead)
    assert await answers(*flags) == alone
    assert sum(num_pending) >= len(PROMPTS) * (NUM_TOKENS - 1), "all but first tokens were taken in flight"
