"""What a router does with the weights of its workers, whatever one of them does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from services.router.workers import weights
from services.router.workers.weights import CHECK, LOAD, PAUSE, RESUME, UNLOAD, FleetWeights
from shared.errors import DeadlineExceeded, ModelLoadError, WorkerLost
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

DEADLINE_S = 30.0


@dataclass(eq=False)
class Worker:
    """The other end of a link: takes steps as a worker does, of folders whose names are their fingerprints."""

    name: str
    folder: str = "/old"
    connected: bool = True
    load: types_pb2.Load = field(default_factory=types_pb2.Load)
    steps: list[int] = field(default_factory=list)
    before: Callable[[int], None] = lambda _step: None
    """Called at each step; what it raises the worker answers."""
    held: dict[int, asyncio.Event] = field(default_factory=dict)
    """A step waits for its event."""
    begun: dict[int, asyncio.Event] = field(default_factory=lambda: {step: asyncio.Event() for step in range(10)})

    @property
    def model_fingerprint(self) -> str:
        return self.folder

    @property
    def calls(self) -> Worker:
        return self

    async def change_weights(self, step, folder="", timeout_s=0.0):
        self.steps.append(step)
        self.begun[step].set()
        self.before(step)
        if step in self.held:
            await self.held[step].wait()
        if step == UNLOAD:
            self.load.asleep = True
        elif step == LOAD:
            self.folder = folder or self.folder
            self.load.asleep = False
            self.load.model_fingerprint = self.folder
        found = folder if step == CHECK else self.folder
        return worker_pb2.WeightsChanged(model_fingerprint=found, folder=self.folder)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():
            await asyncio.sleep(0)


async def test_a_worker_that_joins_during_the_first_update_gets_its_weights_too():
    fleet = [Worker("a", held={LOAD: asyncio.Event()})]
    changes = FleetWeights(lambda: fleet)
    updating = asyncio.create_task(changes.update("/new"))
    await fleet[0].begun[LOAD].wait()
    late = Worker("late")
    fleet.append(late)
    changes.bring(late, "/old")  # as it connects: no update is known yet
    fleet[0].held[LOAD].set()
    assert await updating == ("/new", ["a"])
    await until(lambda: late.steps == [PAUSE, LOAD, RESUME])
    assert [worker.folder for worker in fleet] == ["/new", "/new"]
    assert fleet[0].steps == [CHECK, PAUSE, LOAD, RESUME]
    await changes.close()


async def test_weights_are_brought_again_where_a_worker_did_not_take_them(monkeypatch):
    monkeypatch.setattr(weights, "BRING_AGAIN_S", 0.0)
    failures = [DeadlineExceeded("requests still run"), ModelLoadError("no memory")]

    def fail(step):
        if (step == PAUSE and len(failures) == 2) or (step == LOAD and failures):
            raise failures.pop(0)

    fleet = [Worker("a")]
    changes = FleetWeights(lambda: fleet)
    await changes.update("/new")
    late = Worker("late", before=fail)
    fleet.append(late)
    changes.bring(late, "/old")
    await until(lambda: late.folder == "/new" and late.steps[-1] == RESUME)
    assert late.steps == [PAUSE, RESUME, PAUSE, LOAD, RESUME, PAUSE, LOAD, RESUME]
    await changes.close()


async def test_a_worker_that_got_others_from_another_router_is_left_alone(monkeypatch):
    monkeypatch.setattr(weights, "BRING_AGAIN_S", 0.0)
    fleet = [Worker("a")]
    changes = FleetWeights(lambda: fleet)
    await changes.update("/new")

    def fail(_step):
        late.load.model_fingerprint = late.folder = "/newest"
        raise DeadlineExceeded("requests still run")

    late = Worker("late", before=fail)
    fleet.append(late)
    changes.bring(late, "/old")
    await until(lambda: not changes._bringing)
    assert late.steps == [PAUSE, RESUME]
    await changes.close()


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_routers_updates_a_worker_that_starts_again_gets_the_later_one(first):
    worker = Worker("a")
    routers = [FleetWeights(lambda: [worker]) for _ in range(2)]
    for changes, folder in zip(routers, ("/one", "/two"), strict=True):
        await changes.update(folder)
        for each in routers:
            each.seen(worker.folder)
    worker.folder, worker.load.model_fingerprint = "/old", ""
    worker.steps.clear()
    for changes in (routers[first], routers[1 - first]):
        changes.bring(worker, "/old")
    await until(lambda: worker.steps == [PAUSE, LOAD, RESUME])
    assert worker.folder == "/two"
    assert [changes.may_bring() for changes in routers] == [False, True]
    routers[0].seen("/one")  # the other's update was taken back
    assert routers[0].may_bring()
    for changes in routers:
        await changes.close()


@pytest.mark.parametrize("held", [PAUSE, LOAD])
async def test_an_update_ends_as_it_would_where_its_caller_is_gone(held):
    fleet = [Worker("a", held={held: asyncio.Event()}), Worker("b")]
    changes = FleetWeights(lambda: fleet)
    updating = asyncio.create_task(changes.update("/new"))
    await fleet[0].begun[held].wait()
    updating.cancel()
    asyncio.get_running_loop().call_soon(fleet[0].held[held].set)
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert [worker.folder for worker in fleet] == ["/new", "/new"]
    assert [worker.steps[-1] for worker in fleet] == [RESUME, RESUME]
    assert changes.may_bring()


async def test_sleep_and_wake_end_as_they_would_where_their_callers_are_gone():
    worker = Worker("a", held={UNLOAD: asyncio.Event(), LOAD: asyncio.Event()})
    changes = FleetWeights(lambda: [worker])
    for begin, held in ((changes.sleep, UNLOAD), (changes.wake, LOAD)):
        calling = asyncio.create_task(begin())
        await worker.begun[held].wait()
        calling.cancel()
        asyncio.get_running_loop().call_soon(worker.held[held].set)
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert worker.steps == [PAUSE, UNLOAD, PAUSE, LOAD, RESUME]
    assert not worker.load.asleep


async def test_where_one_worker_cannot_pause_the_others_resume_at_once():
    def fail(step):
        if step == PAUSE:
            raise DeadlineExceeded("requests still run")

    fleet = [Worker("busy", held={PAUSE: asyncio.Event()}), Worker("bad", before=fail)]
    changes = FleetWeights(lambda: fleet)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(DeadlineExceeded, match="requests still run"):
            await changes.update("/new", weights.MAX_TIMEOUT_S)
    assert fleet[0].steps == [CHECK, PAUSE, RESUME]
    assert [worker.folder for worker in fleet] == ["/old", "/old"]


async def test_waking_all_wakes_those_that_are_there():
    fleet = [Worker("a"), Worker("gone"), Worker("awake")]
    changes = FleetWeights(lambda: fleet)
    await changes.sleep(["a", "gone"])
    fleet[1].connected = False
    assert await changes.wake() == ["a"]
    assert fleet[2].steps == []
    with pytest.raises(WorkerLost, match="gone"):
        await changes.wake(["gone"])
    with pytest.raises(WorkerLost, match="no worker"):
        await FleetWeights(list).wake()
