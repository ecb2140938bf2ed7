"""A worker's steps of a change: what ends one, and what is left of one that failed."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from services.worker.session import Session
from services.worker.weights import change
from services.worker.weights.change import CHECK, LOAD, PAUSE, RESUME, UNLOAD, WeightChanges
from shared.errors import ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.rpc.pb.tandem.v1 import worker_pb2

DEADLINE_S = 30.0
LONG_S = 86_400.0


class Listening(Session):
    """A router's session whose events are kept."""

    def __init__(self, number: int) -> None:
        super().__init__(number, f"router-{number}")
        self.answers: dict[int, worker_pb2.WeightsChanged] = {}

    def send(self, **event: worker_pb2.WeightsChanged) -> None:
        self.answers[event["weights_changed"].call] = event["weights_changed"]


class Host:
    """Has weights, none, and reads others or fails at it, as an EngineHost does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = load_config(folder)
        self.model = SimpleNamespace(
            fingerprint="old", config=config, dtype=torch.float32, texts_digest="", has_head=False
        )
        degrees = SimpleNamespace(num_ranks=1)
        self.settings = SimpleNamespace(degrees=degrees, group_hosts=1, is_on_gpu=False, quantization="none", name="w")
        self.calls: list[str] = []
        self.reading = lambda _folder: None

    async def unload(self) -> None:
        self.calls.append("unload")

    async def reload(self, folder: Path) -> None:
        self.calls.append(f"reload {folder.name}")
        await asyncio.to_thread(self.reading, folder)
        self.folder = folder


class Adapters:
    """A pool of adapters, by what it was called."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def rest(self) -> None:
        self._host.calls.append("rest")

    def wake(self) -> None:
        self._host.calls.append("wake")


class Worker:
    """What `WeightChanges` reaches."""

    def __init__(self, folder: Path) -> None:
        self.host = Host(folder)
        self.load = SimpleNamespace(
            paused=False, asleep=False, engine=None, model_fingerprint="", flush=lambda: self.paused.append(None)
        )
        self.paused: list[None] = []
        self.adapters = Adapters(self.host)
        self.idle = asyncio.Event()
        self.died = asyncio.Event()
        self.changes = WeightChanges(self)

    async def flush_cache(self) -> int:
        return 0

    def on_engine_changed(self) -> None:
        pass

    async def take(self, session: Session, step: int, folder: Path | str = "", call: int = 1) -> str:
        """Returns the error's text, empty where there is none."""
        command = worker_pb2.ChangeWeights(call=call, step=step, folder=str(folder), timeout_s=LONG_S)
        async with asyncio.timeout(DEADLINE_S):
            await self.changes.change(session, command)
        return session.answers[call].error.message

    async def pausing(self, session: Session) -> asyncio.Task[str]:
        """A pause that waits for requests to end."""
        task = asyncio.create_task(self.take(session, PAUSE))
        async with asyncio.timeout(DEADLINE_S):
            while not self.load.paused:
                await asyncio.sleep(0)
        return task


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "old"
    write_random_checkpoint(path, dtype=torch.float32)
    return path


async def test_a_resume_ends_a_pause_that_waits(folder):
    worker, session = Worker(folder), Listening(1)
    pausing = await worker.pausing(session)
    assert await worker.take(session, RESUME, call=2) == ""
    assert await pausing == "the router has ended the pause"
    assert not worker.load.paused


async def test_a_pause_that_waits_ends_with_its_routers_session(folder):
    worker, session = Worker(folder), Listening(1)
    pausing = await worker.pausing(session)
    session.close()
    worker.changes.left(session)
    assert await pausing == "the router has ended the pause"
    assert not worker.load.paused


async def test_another_routers_resume_ends_no_pause_that_waits(folder):
    worker, session, other = Worker(folder), Listening(1), Listening(2)
    pausing = await worker.pausing(session)
    resuming = asyncio.create_task(worker.take(other, RESUME))
    await asyncio.sleep(0)
    worker.idle.set()
    assert await pausing == ""
    assert await resuming == ""


async def test_a_router_that_leaves_while_anothers_step_is_taken_leaves_no_worker_paused(folder, monkeypatch):
    worker, session, other = Worker(folder), Listening(1), Listening(2)
    worker.idle.set()
    assert await worker.take(session, PAUSE) == ""

    def leaving(*_):
        loop.call_soon_threadsafe(leave)
        left.result(DEADLINE_S)
        return "f"

    def leave():
        session.close()
        worker.changes.left(session)
        left.set_result(None)

    loop, left = asyncio.get_running_loop(), Future[None]()
    monkeypatch.setattr(change, "check_folder", leaving)
    assert await worker.take(other, CHECK, folder) == ""
    assert not worker.load.paused


async def test_nothing_is_left_of_weights_that_failed_when_the_old_ones_are_read_again(folder):
    worker, session = Worker(folder), Listening(1)
    new = shutil.copytree(folder, folder.parent / "new", dirs_exist_ok=True)
    worker.idle.set()
    alive: list[weakref.ref[object]] = []

    def read(path: Path) -> None:
        if path != new:
            assert alive[0]() is None, "two sets of weights at once"
            return
        weights = torch.nn.Linear(2, 2)
        alive.append(weakref.ref(weights))
        try:
            raise RuntimeError("out of memory")
        except RuntimeError as error:
            raise ModelLoadError("no room") from error

    worker.host.reading = read
    assert await worker.take(session, PAUSE) == ""
    assert await worker.take(session, LOAD, new) == "no room"
    assert worker.host.calls == ["rest", "unload", "reload new", "reload old", "wake"]
    assert not worker.died.is_set()


async def test_a_worker_that_sleeps_wakes_with_no_folder_that_does_not_fit(folder):
    worker, session = Worker(folder), Listening(1)
    other = folder.parent / "other"
    write_random_checkpoint(other, dtype=torch.float32, intermediate_size=128)
    worker.idle.set()
    for step in (PAUSE, UNLOAD):
        assert await worker.take(session, step) == ""
    assert "mlp" in await worker.take(session, LOAD, other)
    assert worker.host.calls == ["rest", "unload"]
    assert worker.load.asleep
    assert await worker.take(session, LOAD) == ""
    assert worker.host.calls == ["rest", "unload", "reload old", "wake"]


@pytest.mark.parametrize(
    ("changed", "says"), [({"group_hosts": 2}, "several hosts"), ({"is_on_gpu": True}, "several GPUs")]
)
async def test_a_group_whose_ranks_cannot_be_started_anew_says_so(folder, changed, says):
    worker, session = Worker(folder), Listening(1)
    vars(worker.host.settings).update({"degrees": SimpleNamespace(num_ranks=2), **changed})
    for step in (CHECK, PAUSE, UNLOAD):
        assert says in await worker.take(session, step)
    assert not worker.load.paused
