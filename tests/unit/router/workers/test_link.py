"""A worker that is removed while its session begins, and when it was heard from."""

from __future__ import annotations

import asyncio

from services.router.placement.views import Pool
from services.router.workers.discovery import DiscoveredWorker
from services.router.workers.link import WorkerLink
from shared.identity import DECODE, WorkerRole
from shared.rpc.pb.tandem.v1 import types_pb2


def link_in(pool: Pool) -> WorkerLink:
    """A link that nobody runs."""
    worker = DiscoveredWorker("d0", DECODE, "h:1")
    return WorkerLink(worker, "router-0", lambda _: None, lambda: None, {WorkerRole.DECODE: pool})


def test_a_session_begins_with_the_target_that_the_router_promises():
    worker, pools = DiscoveredWorker("d0", DECODE, "h:1"), {WorkerRole.DECODE: Pool()}
    link = WorkerLink(worker, "router-0", lambda _: None, lambda: None, pools, tpot_target_s=0.05)
    assert [link._new_epoch().tpot_target_s, link_in(Pool())._new_epoch().tpot_target_s] == [0.05, 0.0]


def test_a_welcome_that_crosses_the_removal_brings_no_work():
    pool = Pool()
    kept, removed = link_in(pool), link_in(pool)
    removed.retire()
    removed._connected(types_pb2.Welcome(num_blocks=8))
    assert len(pool) == 0
    kept._connected(types_pb2.Welcome(num_blocks=4))
    view = pool.get("d0")
    assert view is not None
    removed._lost("gone")
    assert pool.get("d0") is view
    kept._lost("gone")
    assert len(pool) == 0


async def test_a_worker_was_heard_from_after_two_heartbeats_or_its_loss():
    link = link_in(Pool())
    await link.heard()  # not connected: nobody is waited for
    link._connected(types_pb2.Welcome(num_blocks=8))
    await link.heard()  # it sends none
    for end in (lambda: link._on_heartbeat(types_pb2.Heartbeat()), lambda: link._lost("gone")):
        link._connected(types_pb2.Welcome(num_blocks=8, heartbeats=True))
        hearing = asyncio.create_task(link.heard())
        await asyncio.sleep(0)
        link._on_heartbeat(types_pb2.Heartbeat())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not hearing.done()  # that one may have been on its way when the worker died
        end()
        await hearing
