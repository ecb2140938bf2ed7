"""What a worker reports to its routers."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil

from services.prefill.role import PrefillRole
from services.worker.adapters.adapter_pool import AdapterPool
from services.worker.session import Session
from services.worker.telemetry import load_report
from services.worker.telemetry.load_report import REFRESH_S, LoadReporter, ResidentMemory
from services.worker.worker import Worker
from shared.engine.messages import Command, EngineLoad, SetTargets
from shared.engine.speculation.speculator import GuessCounters
from shared.identity import WorkerRole
from shared.kv.layout import BlockLayout, KVFormat
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.sizing.step_time import StepKinds, StepTimes


async def newest_report(session: Session) -> list[str]:
    return list((await newest(session)).load.routers)


async def newest(session: Session) -> worker_pb2.Event:
    envelope = await session.next_envelope()
    assert envelope is not None
    return worker_pb2.Events.FromString(envelope).events[-1]


def prefill_worker(
    tpot_target_ms: float = -1.0,
    submit: Callable[[Command], None] = lambda _: None,
    adapters: AdapterPool | None = None,
) -> Worker:
    """A worker without an engine: its reports are what it is asked for. `submit` takes commands to the engine."""
    host = SimpleNamespace(
        transfer=SimpleNamespace(counters=SimpleNamespace(bytes_sent=0, bytes_received=0)),
        engine=SimpleNamespace(steps=SimpleNamespace(num_steps=0, busy_s=0.0), submit=submit),
        settings=SimpleNamespace(name="prefill-0", tpot_target_ms=tpot_target_ms),
        packing=None,
        guesses=GuessCounters(),
        model=SimpleNamespace(layout=BlockLayout(1, 16, KVFormat("float32", 1, 8))),
    )
    connector = SimpleNamespace(
        nodes=SimpleNamespace(silent=[], on_change=None),
        server=SimpleNamespace(num_given=0),
        fetches=SimpleNamespace(num_tokens=lambda _: 0, num_bad_blocks=0),
    )
    roles = {WorkerRole.PREFILL: PrefillRole}
    return Worker(host, None, connector, roles, adapters=adapters)  # type: ignore[arg-type]


async def test_every_router_hears_who_else_is_connected_and_a_single_one_hears_of_nobody() -> None:
    worker = prefill_worker()
    first, second = Session(1, "r1"), Session(2, "r0")
    worker.on_open(first)
    assert await newest_report(first) == []
    worker.on_open(second)
    assert await newest_report(first) == ["r0", "r1"]
    assert await newest_report(second) == ["r0", "r1"]
    worker.sessions.discard(second)
    worker.load.flush()
    assert await newest_report(first) == []


async def test_a_change_after_a_quiet_time_is_told_at_once_and_those_behind_it_together(monkeypatch) -> None:
    monkeypatch.setattr(load_report, "REPORT_INTERVAL_S", 1e4)
    worker = prefill_worker()
    published: list[int] = []
    reporter = LoadReporter(
        worker.host.transfer.counters, lambda told: published.append(told.num_running), worker.connector
    )
    state = EngineLoad(*[0] * 13)
    for num_running in (1, 2):  # of one turn
        reporter.update(replace(state, num_running=num_running))
    async with asyncio.timeout(60):
        while not published:
            await asyncio.sleep(0)
    assert published == [2]
    reporter.update(replace(state, num_running=3))
    for _ in range(100):
        await asyncio.sleep(0)
    assert published == [2]  # an interval has not passed
    reporter.flush()
    assert published == [2, 3]


async def test_a_report_says_what_the_step_times_rest_on() -> None:
    worker = prefill_worker()
    reporter = LoadReporter(worker.host.transfer.counters, lambda _: None, worker.connector)
    state = EngineLoad(*[0] * 13, step_kinds=StepKinds(3, 5))
    for times, rests_on in ((None, (0, 0)), (StepTimes(1e-3, 4e-3, 2e-5, 1e-5, 1e-8, 1e-9), (3, 5))):
        reporter.update(replace(state, step_times=times))
        message = reporter.message()
        assert (message.num_batch_kinds, message.num_chunk_kinds) == rests_on


async def test_a_drain_can_be_undone_unless_the_process_is_about_to_end() -> None:
    worker = prefill_worker()
    session = Session(1, "r1")
    worker.on_open(session)

    async def reported() -> bool:
        return (await newest(session)).load.draining

    for command, draining in (("drain", True), ("undrain", False)):
        sent = worker_pb2.Command()
        getattr(sent, command).SetInParent()
        worker.take(session, sent)
        assert await reported() is draining
    worker.drain(for_good=True)
    worker.undrain()
    assert await reported() is True


async def test_the_engine_keeps_the_least_target_of_the_routers_unless_the_worker_has_its_own() -> None:
    told: list[Command] = []
    worker, own = prefill_worker(submit=told.append), prefill_worker(0.0, told.append)
    sessions = [Session(i, f"r{i}", types_pb2.Hello(tpot_target_s=s)) for i, s in enumerate((0.0, 0.05, 0.02, 0.04))]
    for session in sessions:
        worker.on_open(session)
        own.on_open(session)
    assert told == [SetTargets(0.05), SetTargets(0.02)]
    for session in sessions:
        worker.on_closed(session)
        own.on_closed(session)
    assert told[2:] == [SetTargets(0.04), SetTargets(0.0)]


PAGE = os.sysconf("SC_PAGE_SIZE")


def test_the_figure_is_read_again_only_after_a_second(tmp_path: Path) -> None:
    statm = tmp_path / "statm"
    statm.write_text("900 70 30 1 0 80 0\n")
    memory = ResidentMemory(statm)
    assert memory.num_bytes(5.0) == 70 * PAGE
    statm.write_text("900 90 30 1 0 80 0\n")
    assert memory.num_bytes(5.0 + REFRESH_S / 2) == 70 * PAGE
    assert memory.num_bytes(5.0 + REFRESH_S) == 90 * PAGE


def test_a_system_without_the_file_has_no_figure(tmp_path: Path) -> None:
    memory = ResidentMemory(tmp_path / "statm")
    assert memory.num_bytes(0.0) is None
    (tmp_path / "statm").write_text("nonsense\n")
    assert memory.num_bytes(REFRESH_S) is None


def test_memory_that_is_touched_shows() -> None:
    held = 64 << 20
    memory = ResidentMemory()
    before = memory.num_bytes(0.0)
    with mmap.mmap(-1, held) as touched:  # of its own: what the heap has freed may still be resident
        for place in range(0, held, PAGE):
            touched[place] = 1
        after = memory.num_bytes(REFRESH_S)
        rss = psutil.Process().memory_info().rss
    assert before is not None
    assert after is not None
    assert after - before > held // 2
    assert abs(after - rss) < held
