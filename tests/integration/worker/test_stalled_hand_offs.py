"""A hand-off whose blocks leave and do not arrive, by real sessions, engines and pools.

What a sender sends under another ticket is never taken, as what it sends into a network that is cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from shared.identity import DECODE
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.integration.worker.session_rig import SAMPLING, Router, pools, serving

NUM_REPORTS = 9
"""More than a stalled hand-off needs."""


@pytest.fixture(autouse=True)
def reports_and_stalls_in_a_25th_of_their_time(monkeypatch):
    for module in ("role", "reservation"):
        monkeypatch.setattr(f"services.decode.{module}.REPORT_EVERY_S", 0.02)
    monkeypatch.setattr("services.decode.reservation.DESERTED_S", 0.2)
    monkeypatch.setattr("shared.kv.handoff.stall.STALLED_S", 0.12)


async def submit(it: SimpleNamespace, request_id: str, ticket: int) -> None:
    await it.prefill.submit(
        request_id,
        ticket=ticket,
        needed_blocks=it.reserved.needed_blocks,
        transfer_address=it.receiver.transfer.address,
        notes=True,
    )


async def pass_on(it: SimpleNamespace) -> None:
    """One report of the decode worker, as a router passes it on."""
    report = (await it.decode.event("arrivals")).arrivals
    report.transfer_address = it.receiver.transfer.address
    await it.prefill.send(arrivals=report)


@contextlib.asynccontextmanager
async def passing_on(it: SimpleNamespace) -> AsyncIterator[None]:
    """All reports meanwhile: a slow machine's prefill worker has nothing sent at the first ones."""

    async def keep_passing() -> None:
        while not is_over:
            await pass_on(it)

    is_over = False
    passing = asyncio.create_task(keep_passing())
    yield
    is_over = True
    await passing  # its last report: to cancel a read would end the session


async def test_blocks_that_leave_and_do_not_arrive_fail_the_request_and_all_for_the_same_receiver():
    async with pools() as it:
        await submit(it, "a#1", it.reserved.ticket ^ 1)
        await submit(it, "other#1", it.reserved.ticket ^ 2)
        async with passing_on(it):
            failures = [(await it.prefill.event("failed")).failed for _ in range(2)]
        assert {failed.request_id for failed in failures} == {"a#1", "other#1"}
        assert {failed.error.kind for failed in failures} == {"PeerUnreachable"}
        await it.sender.idle()  # its blocks are free, although nothing took them
        await it.receiver.holds(3)
        await it.decode.send(cancel=types_pb2.Cancel(request_id="a#1"))


async def test_a_sender_that_computes_for_long_is_left_alone():
    async with pools() as it:
        it.sender.runner.may_step.clear()
        await submit(it, "a#1", it.reserved.ticket)
        for _ in range(NUM_REPORTS):
            await pass_on(it)
        it.sender.runner.may_step.set()
        await it.prefill.event("first_token")
        assert await it.decode.tokens("a#1") == [7] * (SAMPLING["max_tokens"] - 1)


async def test_a_trailer_that_left_and_did_not_arrive_is_a_stall_too():
    """Small messages leave into a buffer of the network: the prefill worker has forgotten the request by then."""
    async with pools() as it:
        async with passing_on(it):
            failed = (await it.prefill.event("failed")).failed
        assert (failed.request_id, failed.error.kind) == ("a#1", "PeerUnreachable")
        await it.decode.send(cancel=types_pb2.Cancel(request_id="a#1"))


async def test_a_cancelled_reservation_does_not_wait_for_a_trailer_that_stays_away():
    async with pools() as it:
        await it.decode.send(cancel=types_pb2.Cancel(request_id="a#1", peer_active=True, peer="p0"))


async def test_nothing_is_reported_while_blocks_are_not_awaited():
    async with serving(DECODE) as worker, Router(worker) as router:
        await router.reserve("here#1", prefill_here=True)
        assert len(await router.tokens("here#1")) == SAMPLING["max_tokens"]
        assert not any(event.WhichOneof("event") == "arrivals" for event in router._kept)
        assert worker.role._looking is None
