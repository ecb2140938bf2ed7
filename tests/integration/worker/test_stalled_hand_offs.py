"""A hand-off whose blocks leave and do not arrive, by real sessions, engines and pools.

What a sender sends under another ticket is never taken, as what it sends into a network that is cut."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from shared.identity import DECODE
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.integration.worker.session_rig import SAMPLING, Router, pools, serving

NUM_REPORTS = 9
"""More than a stalled hand-off needs."""


async def submit(it: SimpleNamespace, request_id: str, ticket: int) -> None:
    await it.prefill.submit(
        request_id,
        ticket=ticket,
        needed_blocks=it.reserved.needed_blocks,
        transfer_address=it.receiver.transfer.address,
        notes=True,
    )


async def pass_on(it: SimpleNamespace, count: int) -> None:
    """Reports of the decode worker, as a router passes them on."""
    for _ in range(count):
        report = (await it.decode.event("arrivals")).arrivals
        report.transfer_address = it.receiver.transfer.address
        await it.prefill.send(arrivals=report)


async def test_blocks_that_leave_and_do_not_arrive_fail_the_request_and_all_for_the_same_receiver():
    async with pools() as it:
        await submit(it, "a#1", it.reserved.ticket ^ 1)
        await submit(it, "other#1", it.reserved.ticket ^ 2)
        passing = asyncio.create_task(pass_on(it, NUM_REPORTS))
        failures = [(await it.prefill.event("failed")).failed for _ in range(2)]
        assert {failed.request_id for failed in failures} == {"a#1", "other#1"}
        assert {failed.error.kind for failed in failures} == {"PeerUnreachable"}
        await it.sender.idle()  # its blocks are free, although nothing took them
        await it.receiver.holds(3)
        await passing
        await it.decode.send(cancel=types_pb2.Cancel(request_id="a#1"))


async def test_a_sender_that_computes_for_long_is_left_alone():
    async with pools() as it:
        it.sender.runner.may_step.clear()
        await submit(it, "a#1", it.reserved.ticket)
        await pass_on(it, NUM_REPORTS)
        it.sender.runner.may_step.set()
        await it.prefill.event("first_token")
        assert await it.decode.tokens("a#1") == [7] * (SAMPLING["max_tokens"] - 1)


async def test_a_trailer_that_left_and_did_not_arrive_is_a_stall_too():
    """Small messages leave into a buffer of the network: the prefill worker has forgotten the request by then."""
    async with pools() as it:
        passing = asyncio.create_task(pass_on(it, NUM_REPORTS))
        failed = (await it.prefill.event("failed")).failed
        assert (failed.request_id, failed.error.kind) == ("a#1", "PeerUnreachable")
        await passing
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
