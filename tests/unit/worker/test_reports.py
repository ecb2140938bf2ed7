"""What a worker reports beside its load: which routers share its time, and whether it drains."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from services.prefill.role import PrefillRole
from services.worker.session import Session
from services.worker.worker import Worker
from shared.engine.messages import Command, SetTargets
from shared.identity import WorkerRole
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2


async def newest_report(session: Session) -> list[str]:
    return list((await newest(session)).load.routers)


async def newest(session: Session) -> worker_pb2.Event:
    envelope = await session.next_envelope()
    assert envelope is not None
    return worker_pb2.Events.FromString(envelope).events[-1]


def prefill_worker(tpot_target_ms: float = -1.0, submit: Callable[[Command], None] = lambda _: None) -> Worker:
    """A worker without an engine: its reports are what it is asked for. `submit` takes commands to the engine."""
    host = SimpleNamespace(
        transfer=SimpleNamespace(counters=SimpleNamespace(bytes_sent=0, bytes_received=0)),
        engine=SimpleNamespace(steps=SimpleNamespace(num_steps=0, busy_s=0.0), submit=submit),
        settings=SimpleNamespace(tpot_target_ms=tpot_target_ms),
    )
    connector = SimpleNamespace(
        nodes=SimpleNamespace(silent=[], on_change=None),
        server=SimpleNamespace(num_given=0),
        fetches=SimpleNamespace(num_tokens=lambda _: 0, num_bad_blocks=0),
    )
    return Worker(host, None, connector, {WorkerRole.PREFILL: PrefillRole})  # type: ignore[arg-type]


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
