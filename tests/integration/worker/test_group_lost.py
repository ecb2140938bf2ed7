"""A rank that ends, or is stopped, in the middle of steps: its group's waits end, whatever they wait in."""

from __future__ import annotations

import asyncio
import signal
from functools import partial

import psutil
import pytest

from services.worker import host
from services.worker.host import EngineHost
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.engine.engine import Engine
from shared.engine.messages import AddSequence, EngineDied, Event, SequenceFailed, StepOutput
from shared.engine.sampling_params import SamplingParams
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import RankLost
from tests.unit.collectives.in_threads import needs_library
from tests.waiting import DEADLINE_S

pytestmark = [
    needs_library,
    # The engine's, which ends.
    pytest.mark.filterwarnings("ignore:Exception in thread engine:pytest.PytestUnhandledThreadExceptionWarning"),
]

PROMPT = list(range(7, 40))
MAX_TOKENS = 900
"""More than are computed before the rank is gone."""
OVER_TCP = ("--collectives", "gloo", "--group-pool", "own")
SPLITS = [
    ("--tp", "2"),
    ("--tp", "2", *OVER_TCP),
    ("--pp", "2", *OVER_TCP),
    ("--tp", "2", "--pp", "2", *OVER_TCP),
]
CASES = [(how, flags, ahead) for how in (signal.SIGSTOP, signal.SIGKILL) for flags in SPLITS for ahead in (False, True)]
FIRST = [CASES[0], (signal.SIGKILL, SPLITS[1], True)]


def settings(*flags: str) -> WorkerSettings:
    always = ("--name", "d0", "--bind", "127.0.0.1:0", "--model", "models/demo", "--dtype", "fp32")
    sizes = ("--num-threads", "2", "--num-kv-blocks", "200", "--max-model-len", "1024")
    return load_settings(
        WorkerSettings, [*always, *sizes, "--max-num-batched-tokens", "64", "--max-num-seqs", "8", *flags]
    )


@pytest.mark.parametrize(
    ("how", "flags", "ahead"),
    [*FIRST, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in FIRST)],
    ids=str,
)
async def test_a_lost_rank_ends_the_engine_and_every_process(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], how: signal.Signals, *, ahead: bool
) -> None:
    """`ahead`: with a step in flight when it is lost, as on GPUs."""
    monkeypatch.setattr(host, "Engine", partial(Engine, ahead=ahead))
    # The leader is this process, which other tests need as it was.
    monkeypatch.setattr(host, "take_share", lambda *_: None)
    others = psutil.Process().children()  # of tests before this one
    engine_host = EngineHost(settings(*flags))
    events: asyncio.Queue[Event] = asyncio.Queue()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS)
    sequence = EngineSequence(
        "s", list(PROMPT), len(PROMPT), params, b"root-of-a-model!", Goal.COMPLETION, 33 + MAX_TOKENS, frozenset()
    )
    followers: list[psutil.Process] = []
    num_tokens = 0
    try:
        engine_host.listen(events.put_nowait)
        await engine_host.start(lambda *_: None)
        followers = [child for child in psutil.Process().children() if child not in others]
        engine_host.engine.submit(AddSequence(sequence))
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(event := await events.get(), EngineDied):
                assert not isinstance(event, SequenceFailed), event.error
                if isinstance(event, StepOutput) and event.tokens:
                    num_tokens += 1
                    if num_tokens == 3:
                        followers[-1].send_signal(how)
        assert isinstance(event.error, RankLost)
        assert num_tokens < MAX_TOKENS
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await engine_host.close()  # joins the engine's thread, whose wait has ended
    assert not psutil.wait_procs(followers, timeout=DEADLINE_S)[1]
