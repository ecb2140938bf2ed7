"""The router moves running answers by what workers report, over real sessions: who is asked for what, and when."""

from __future__ import annotations

import asyncio
import math

import pytest

from services.router.dispatch.record import MoveNote, RequestState
from services.router.dispatch.request import Resume
from services.router.placement.move_settings import MoveSettings
from services.router.placement.moves import MoveCause, MoveLimits
from shared.errors import DeadlineExceeded, TakenOver
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.router_under_test import PROMPT, STOP, Router, decode_worker, read

LONG = {"max_tokens": 500}
ROOM = {"num_free_blocks": 100, "num_total_blocks": 100}


async def begun(router: Router, *workers, request_id: str = "r", **fields):
    """A running answer with two tokens, its worker, that worker's name of it, and the other one."""
    running = router.submit(request_id, **LONG, **fields)
    await router.until(lambda: any(not worker.commands.empty() for worker in workers))
    busy = next(worker for worker in workers if not worker.commands.empty())
    (other,) = (worker for worker in workers if worker is not busy)
    reserve = await busy.expect(worker_pb2.Reserve)
    await busy.step(reserve.request_id, 50, 51)
    await router.until(lambda: running.state is RequestState.DECODING)
    return running, busy, reserve.request_id, other


@pytest.fixture
async def pair():
    workers = decode_worker("d0"), decode_worker("d1")
    async with Router([], list(workers)) as router:
        for worker in workers:
            await worker.report(**ROOM)
        yield router, workers


async def finish(router, running, old, name, new) -> None:
    """The move to its end: the other worker answers, the old one gets a Cancel, and the client has every token once."""
    reserve = await new.expect(worker_pb2.Reserve)
    assert list(reserve.token_ids) == [*PROMPT, 50, 51]
    assert reserve.prefill_here
    await old.step(name, 52)
    await router.until(lambda: running.produced == [50, 51, 52])
    await new.step(reserve.request_id, 52)
    cancel = await old.expect(types_pb2.Cancel)
    assert cancel.request_id == name
    await new.step(reserve.request_id, 53, finish=STOP)
    assert await read(running) == [50, 51, 52, 53]
    await running.aclose()
    assert all(not link.num_requests and not link._standing.num_open for link in router.fleet.links)


async def test_the_answers_of_a_draining_worker_move(pair):
    router, workers = pair
    running, old, name, new = await begun(router, *workers)
    await old.report(**ROOM, draining=True)
    await finish(router, running, old, name, new)
    assert running.record.moves == [MoveNote(MoveCause.DRAIN, old.name, new.name)]
    assert router.metrics.outcomes == ["finished"]


async def test_where_that_is_switched_off_they_stay():
    workers = decode_worker("d0"), decode_worker("d1")
    async with Router([], list(workers), moves=MoveSettings(drain=False)) as router:
        running, old, name, _ = await begun(router, *workers)
        await old.report(**ROOM, draining=True)
        link = router.fleet.decodes[old.name]
        await router.until(lambda: link.load.draining)
        router.dispatcher._mover._looked_at, router.dispatcher._mover._again = -math.inf, None
        router.dispatcher.pump()  # looks now
        await old.step(name, 52, finish=STOP)
        assert await read(running) == [50, 51, 52]
        assert running.record.moves == []


async def test_workers_that_are_wanted_for_prompts_lose_their_answers_until_that_is_taken_back(pair):
    router, workers = pair
    running, old, name, new = await begun(router, *workers)
    router.dispatcher.vacate({old.name, new.name})  # there is nowhere to go
    router.dispatcher.vacate({old.name})
    await finish(router, running, old, name, new)
    assert [note.cause for note in running.record.moves] == [MoveCause.PREFERENCE]
    router.dispatcher.vacate(frozenset())
    assert router.dispatcher._mover.vacated == frozenset()


async def test_only_a_running_answer_moves_and_only_to_another_worker_that_takes_work(pair):
    router, workers = pair
    move = router.dispatcher.move
    assert not move("r", "d1", MoveCause.RESCUE)
    running, old, _, new = await begun(router, *workers)
    assert not move("r", old.name, MoveCause.RESCUE)
    assert not move("r", "d7", MoveCause.RESCUE)
    running.deaths.note("r", "d7", 0)
    assert not move("r", new.name, MoveCause.RESCUE), "it was present at a death just now"
    running.deaths = type(running.deaths)()
    await new.report(**ROOM, draining=True)
    await router.until(lambda: router.fleet.decodes[new.name].load.draining)
    assert not move("r", new.name, MoveCause.RESCUE)
    await new.report(**ROOM)
    await router.until(lambda: not router.fleet.decodes[new.name].load.draining)
    assert move("r", new.name, MoveCause.RESCUE)
    assert not move("r", new.name, MoveCause.RESCUE), "it is moving"
    await running.aclose()
    assert isinstance(await new.expect(worker_pb2.Reserve), worker_pb2.Reserve)
    assert {(await worker.expect(types_pb2.Cancel)).request_id for worker in workers} == {"r#1.1", "r#1.1.m1"}


async def test_a_client_that_continues_elsewhere_ends_the_move_on_both_workers(pair):
    router, workers = pair
    older, _, _, new = await begun(router, *workers)
    assert router.dispatcher.move("r", new.name, MoveCause.RESCUE)
    await new.expect(worker_pb2.Reserve)
    newer = router.ask("r", resume=Resume((50, 51)))
    for worker in workers:
        assert (await worker.expect(types_pb2.Cancel)).request_id.startswith("r#1.1")
    with pytest.raises(TakenOver):
        await read(older)
    await older.aclose()
    await newer.aclose()
    await router.until(lambda: all(not link.num_requests for link in router.fleet.links))


async def test_a_deadline_passes_in_a_move_as_elsewhere(pair):
    router, workers = pair
    running = router.ask("r", timeout_s=0.5)
    await router.until(lambda: any(not worker.commands.empty() for worker in workers))
    old = next(worker for worker in workers if not worker.commands.empty())
    (new,) = (worker for worker in workers if worker is not old)
    reserve = await old.expect(worker_pb2.Reserve)
    await old.step(reserve.request_id, 50)
    await router.until(lambda: running.state in (RequestState.DECODING, RequestState.FAILED))
    moving = router.dispatcher.move("r", new.name, MoveCause.RESCUE)
    with pytest.raises(DeadlineExceeded):
        await read(running)
    await running.aclose()
    assert (await old.expect(types_pb2.Cancel)).request_id == "r#1.1"
    if moving:  # else the machine was too slow for it
        await new.expect(worker_pb2.Reserve)
        assert (await new.expect(types_pb2.Cancel)).request_id == "r#1.1.m1"


async def test_many_answers_of_a_drained_worker_move_a_few_at_once(pair):
    router, workers = pair
    answers = [router.submit(f"r{number}", **LONG) for number in range(6)]
    names: dict[str, list[str]] = {worker.name: [] for worker in workers}
    for _ in answers:
        await router.until(lambda: any(not worker.commands.empty() for worker in workers))
        worker = next(worker for worker in workers if not worker.commands.empty())
        names[worker.name].append((await worker.expect(worker_pb2.Reserve)).request_id)
        await worker.step(names[worker.name][-1], 50)
    old, new = sorted(workers, key=lambda worker: -len(names[worker.name]))
    await router.until(lambda: all(running.state is RequestState.DECODING for running in answers))
    await old.report(**ROOM, draining=True)
    left = set(names[old.name])
    while left:
        first = await new.expect(worker_pb2.Reserve)
        moving = [each for each in answers if each.state in (RequestState.COPYING, RequestState.CLOSING_UP)]
        assert len(moving) <= MoveLimits().per_worker
        await new.step(first.request_id, 51)
        left.remove((await old.expect(types_pb2.Cancel)).request_id)
    await asyncio.gather(*(running.aclose() for running in answers))
