"""Another sender, or another router, takes a request over."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from shared.engine.messages import JoinSequence
from shared.identity import DECODE, PREFILL
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.worker.session_rig import SAMPLING, Router, pools, serving
from tests.local_transfer import LocalPlane
from tests.waiting import DEADLINE_S, until


async def submit(it: SimpleNamespace, request_id: str, reserved: worker_pb2.Reserved) -> None:
    await it.prefill.submit(
        request_id,
        ticket=reserved.ticket,
        needed_blocks=reserved.needed_blocks,
        transfer_address=it.receiver.transfer.address,
        notes=reserved.reassignable,
    )


async def reassigned(it: SimpleNamespace, **fields) -> worker_pb2.Reserved:
    await it.decode.send(reassign=worker_pb2.Reassign(request_id="a#1", lost="p0", **fields))
    return (await it.decode.event("reserved")).reserved


async def test_the_next_sender_gets_a_ticket_of_its_own_and_the_request_goes_on():
    async with pools() as it:
        assert it.reserved.reassignable
        again = await reassigned(it)
        assert again.ticket != it.reserved.ticket
        assert list(again.needed_blocks) == list(it.reserved.needed_blocks) == [0, 1, 2]
        await submit(it, "a#1.2", again)
        await it.prefill.event("first_token")
        assert await it.decode.tokens("a#1") == [7] * (SAMPLING["max_tokens"] - 1)


async def test_what_a_lost_sender_sends_later_is_dropped():
    async with pools() as it:
        again = await reassigned(it)
        await submit(it, "a#1", it.reserved)  # the first sender, late: it finishes, for nobody
        await it.prefill.event("first_token")
        await it.sender.idle()
        await it.receiver.holds(3)
        assert it.receiver.transfer.counters.blocks_received == 0
        await submit(it, "a#1.2", again)
        assert await it.decode.tokens("a#1") == [7] * (SAMPLING["max_tokens"] - 1)
        assert it.receiver.transfer.counters.blocks_received == 3


async def test_a_sender_that_gave_up_leaves_the_reservation_to_the_router():
    """Its own session broke: it aborts by a trailer, while the decode worker's router looks for another one."""
    async with pools() as it:
        await it.prefill.submit(
            "a#1",
            ticket=it.reserved.ticket,
            needed_blocks=[0, 1, 2],
            transfer_address=it.receiver.transfer.address,
            sampling={name: value for name, value in SAMPLING.items() if name != "seed"},
        )
        await it.prefill.event("failed")
        await it.sender.idle()  # its trailer was taken
        await it.receiver.holds(3)
        await submit(it, "a#1.2", await reassigned(it))
        assert await it.decode.tokens("a#1") == [7] * (SAMPLING["max_tokens"] - 1)


async def test_a_cancel_behind_the_abort_frees_the_blocks_at_once():
    async with pools() as it:
        await it.prefill.submit(
            "a#1", ticket=it.reserved.ticket, transfer_address=it.receiver.transfer.address, num_prompt_tokens=0
        )
        await it.prefill.event("failed")
        await it.sender.idle()
        await it.decode.send(cancel=types_pb2.Cancel(request_id="a#1", peer_active=True, peer="p0"))


async def test_a_cancel_while_another_sender_is_awaited_frees_the_blocks():
    async with pools() as it:
        await reassigned(it)
        await it.decode.send(cancel=types_pb2.Cancel(request_id="a#1"))


async def test_a_request_that_has_joined_needs_nobody():
    async with serving(DECODE, plane := LocalPlane()) as receiver, serving(PREFILL, plane) as sender:
        async with Router(receiver) as decode, Router(sender) as prefill:
            await decode.reserve("a#1")
            reserved = (await decode.event("reserved")).reserved
            it = SimpleNamespace(receiver=receiver, sender=sender, decode=decode, prefill=prefill)
            joins, take = asyncio.Event(), receiver.engine.submit
            receiver.engine.submit = lambda command: (
                joins.set() if isinstance(command, JoinSequence) else None,
                take(command),
            )
            receiver.runner.may_step.clear()
            await submit(it, "a#1", reserved)
            async with asyncio.timeout(DEADLINE_S):
                await joins.wait()
            again = await reassigned(it)
            receiver.runner.may_step.set()
            assert (again.joined, again.first_token, again.ticket) == (True, 7, 0)
            await decode.tokens("a#1")
        await receiver.idle()


async def test_the_memory_in_which_blocks_arrived_is_let_go_while_their_answer_runs(monkeypatch):
    """Of a GPU's worker it is pinned, and serves the next hand-off."""
    async with serving(DECODE, plane := LocalPlane()) as receiver, serving(PREFILL, plane) as sender:
        incoming, slots = receiver.runner.blocks.incoming, []

        def staged(block_ids):
            arrays = [np.zeros(place.nbytes, np.uint8) for place in incoming(block_ids)]
            slots.extend(map(weakref.ref, arrays))
            return list(map(memoryview, arrays))

        monkeypatch.setattr(receiver.runner.blocks, "incoming", staged)
        async with Router(receiver) as decode, Router(sender) as prefill:
            await decode.reserve("a#1")
            reserved = (await decode.event("reserved")).reserved
            it = SimpleNamespace(receiver=receiver, sender=sender, decode=decode, prefill=prefill)
            receiver.runner.may_step.clear()
            await submit(it, "a#1", reserved)
            await sender.idle()
            await until(lambda: [item.first_token for item in receiver.role.requests.values()] == [7])
            gc.collect()
            kept = [slot() is not None for slot in slots]
            receiver.runner.may_step.set()
            assert kept == [False] * 3
            await decode.tokens("a#1")
        await receiver.idle()


async def test_the_first_token_that_the_client_has_counts():
    async with pools() as it:
        joins, take = [], it.receiver.engine.submit
        it.receiver.engine.submit = lambda command: (joins.append(command), take(command))
        await submit(it, "a#1.2", await reassigned(it, first_token=55))
        await it.decode.tokens("a#1")
        assert [command.first_token for command in joins if isinstance(command, JoinSequence)] == [55]


async def test_a_reassignment_of_an_unknown_request_is_refused_and_leaves_the_others():
    async with pools() as it:
        await it.decode.send(reassign=worker_pb2.Reassign(request_id="gone"))
        failed = (await it.decode.event("failed")).failed
        assert (failed.request_id, failed.error.kind) == ("gone", "WorkerLost")
        await it.receiver.holds(3)
        await submit(it, "a#1", it.reserved)
        await it.decode.tokens("a#1")


async def test_a_request_without_a_reservation_cannot_be_reassigned():
    async with serving(DECODE) as worker, Router(worker) as router:
        worker.runner.may_step.clear()
        await router.reserve("a#1", prefill_here=True)
        await router.send(reassign=worker_pb2.Reassign(request_id="a#1"))
        assert (await router.event("failed")).failed.error.kind == "WorkerLost"
        worker.runner.may_step.set()
        assert await router.tokens("a#1") == [7] * SAMPLING["max_tokens"]


LONG = {**SAMPLING, "max_tokens": 200}


@pytest.mark.parametrize("prefill_here", [True, False])
async def test_a_decode_worker_ends_the_older_attempt(prefill_here):
    async with serving(DECODE) as worker, Router(worker) as older, Router(worker, router_name="r2") as newer:
        worker.runner.may_step.clear()  # an answer that is computed here cannot end before it is taken over
        await older.reserve("a#3", prefill_here=prefill_here, tenant="t", sampling=LONG)
        if prefill_here:
            await worker.holds_some()
        else:
            await older.event("reserved")
        await newer.send(take_over=types_pb2.TakeOver(request_id="a", tenant="t"))
        failed = (await older.event("failed")).failed
        assert (failed.request_id, failed.error.kind) == ("a#3", "TakenOver")
        worker.runner.may_step.set()
        await worker.idle()


async def test_a_prefill_worker_ends_the_older_attempt():
    async with serving(PREFILL) as worker, Router(worker) as older, Router(worker, router_name="r2") as newer:
        worker.engine.close()  # nothing is computed: the prompt stays where it is
        await older.submit("a#1", tenant="t")
        await until(lambda: worker.role.requests)
        await newer.submit("a#1", tenant="t", ticket=10)
        await newer.send(take_over=types_pb2.TakeOver(request_id="a", tenant="t"))
        failed = (await older.event("failed")).failed
        assert (failed.request_id, failed.error.kind) == ("a#1", "TakenOver")
        assert len(worker.role.requests) == 1  # the newer router's own


async def test_requests_of_other_tenants_names_and_of_the_session_itself_go_on():
    async with (
        serving(DECODE) as worker,
        Router(worker) as older,
        Router(worker, router_name="r1") as third,
        Router(worker, router_name="r2") as newer,
    ):
        await older.reserve("a#1", prefill_here=True, tenant="t")
        await third.reserve("ab#1", prefill_here=True, tenant="u")
        await newer.reserve("a#1", prefill_here=True, tenant="u")
        await newer.send(take_over=types_pb2.TakeOver(request_id="a", tenant="u"))
        answer = [7] * SAMPLING["max_tokens"]
        assert await older.tokens("a#1") == answer
        assert await third.tokens("ab#1") == answer
        assert await newer.tokens("a#1") == answer
        await worker.idle()
