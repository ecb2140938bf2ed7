"""A request that goes on at another router: a worker frees what the older router's session has of it, at once."""

from __future__ import annotations

import pytest

from shared.identity import DECODE, PREFILL
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.integration.worker.session_rig import SAMPLING, Router, serving
from tests.waiting import until

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
