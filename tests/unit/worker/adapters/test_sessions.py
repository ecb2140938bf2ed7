"""What becomes of adapters that a router had read when its session ends before it named them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from services.worker.session import Session
from shared.rpc.pb.tandem.v1 import worker_pb2
from tests.unit.worker.adapters.test_adapter_pool import Rig, rig
from tests.unit.worker.test_reports import prefill_worker
from tests.waiting import DEADLINE_S, until


class Served:
    """A worker with the rig's pool; its commands are those of a router's session."""

    def __init__(self, rig: Rig, root: Path) -> None:
        self.root = root
        self.worker = prefill_worker(adapters=rig.pool)

    def open(self, number: int) -> Session:
        session = Session(number, f"r{number}")
        self.worker.on_open(session)
        return session

    def close(self, session: Session) -> None:
        session.close()
        self.worker.on_closed(session)

    def tell(self, session: Session, **command: str) -> None:
        folder = str(self.root / command.pop("folder")) if "folder" in command else ""
        load = worker_pb2.LoadAdapter(folder=folder, **command)
        self.worker.take(session, worker_pb2.Command(load_adapter=load))

    def drop(self, session: Session, digest: str) -> None:
        unload = worker_pb2.UnloadAdapter(digest=digest)
        self.worker.take(session, worker_pb2.Command(unload_adapter=unload))

    async def done(self) -> None:
        await until(lambda: not self.worker._holding)


async def test_what_a_session_had_read_is_given_up_with_it_and_what_it_named_stays(tmp_path: Path) -> None:
    async with rig(root=tmp_path) as r:
        r.contents |= {"x": "X", "y": "Y", "z": "Z"}
        served = Served(r, tmp_path)
        session = served.open(1)
        for folder in "xyz":
            served.tell(session, folder=folder)
            await served.done()
        served.tell(session, name="n", digest="X")
        served.drop(session, "Z")
        await served.done()
        assert {(name, known.digest) for name, known in r.pool.known()} == {("n", "X"), ("", "Y")}
        served.close(session)
        assert [(name, known.digest) for name, known in r.pool.known()] == [("n", "X")]


async def test_a_session_that_ends_while_a_folder_is_read_leaves_nothing(tmp_path: Path) -> None:
    async with rig(root=tmp_path) as r:
        r.contents["x"] = "X"
        r.gates["x"] = threading.Event()
        served = Served(r, tmp_path)
        session = served.open(1)
        served.tell(session, folder="x")
        await until(lambda: r.reads)
        served.close(session)
        r.gates["x"].set()
        await served.done()
        assert r.pool.known() == []


async def test_what_two_sessions_had_read_stays_for_the_one_that_is_left(tmp_path: Path) -> None:
    async with rig(root=tmp_path) as r:
        r.contents["x"] = "X"
        served = Served(r, tmp_path)
        first, second, third = (served.open(number) for number in range(3))
        for session in (first, second):
            served.tell(session, folder="x")
            await served.done()
        served.tell(third, name="stolen", digest="X")
        served.drop(third, "X")
        served.close(first)
        served.tell(second, name="n", digest="X")
        await served.done()
        assert r.pool.names == {"n": "X"}
        served.close(second)
        assert r.pool.names == {"n": "X"}


async def test_the_event_loop_runs_while_links_of_a_folder_are_followed(tmp_path: Path) -> None:
    async with rig(root=tmp_path) as r:
        r.contents["x"] = "X"
        served = Served(r, tmp_path)
        begun, gate, allowed = threading.Event(), threading.Event(), r.pool.allowed

        def slow(folder: str) -> Path:
            begun.set()
            assert gate.wait(DEADLINE_S)
            return allowed(folder)

        r.pool.allowed = slow  # type: ignore[method-assign]
        session = served.open(1)
        served.tell(session, folder="x")
        await until(begun.is_set)
        assert r.pool.known() == []
        gate.set()
        async with asyncio.timeout(DEADLINE_S):
            await served.done()
        assert [known.digest for _, known in r.pool.known()] == ["X"]
