"""What a worker reports beside its load: which routers share its time, and whether it drains."""

from __future__ import annotations

from types import SimpleNamespace

from services.prefill.worker import PrefillWorker
from services.worker.session import Session
from shared.rpc.pb.tandem.v1 import prefill_pb2


async def newest_report(session: Session[prefill_pb2.PrefillEvent]) -> list[str]:
    event = await session.next_event()
    while not session._outgoing.empty():
        event = await session.next_event()
    return list(event.load.routers)


def prefill_worker() -> PrefillWorker:
    """A worker without an engine: its reports are what it is asked for."""
    host = SimpleNamespace(
        transfer=SimpleNamespace(counters=SimpleNamespace(bytes_sent=0, bytes_received=0)),
        engine=SimpleNamespace(steps=SimpleNamespace(num_steps=0, busy_s=0.0)),
    )
    connector = SimpleNamespace(
        nodes=SimpleNamespace(silent=[], on_change=None),
        server=SimpleNamespace(num_given=0),
        fetches=SimpleNamespace(num_tokens=lambda _: 0, num_bad_blocks=0),
    )
    return PrefillWorker(host, None, connector)  # type: ignore[arg-type]


async def test_every_router_hears_who_else_is_connected_and_a_single_one_hears_of_nobody() -> None:
    worker = prefill_worker()
    first, second = Session[prefill_pb2.PrefillEvent](1, "r1"), Session[prefill_pb2.PrefillEvent](2, "r0")
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
    session = Session[prefill_pb2.PrefillEvent](1, "r1")
    worker.on_open(session)

    async def reported() -> bool:
        event = await session.next_event()
        while not session._outgoing.empty():
            event = await session.next_event()
        return event.load.draining

    for command, draining in (("drain", True), ("undrain", False)):
        sent = prefill_pb2.PrefillCommand()
        getattr(sent, command).SetInParent()
        worker.take(session, sent)
        assert await reported() is draining
    worker.drain(for_good=True)
    worker.undrain()
    assert await reported() is True
