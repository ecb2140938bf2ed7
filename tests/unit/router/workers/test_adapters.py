"""What the names of adapters mean over all workers, while they are loaded, reloaded and lost."""

from __future__ import annotations

import asyncio

import pytest

from services.router.workers.adapter_names import AdapterDirectory
from shared.errors import InvalidRequest, NotFound, WorkerLost
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.waiting import DEADLINE_S, until


class FakeWorker:
    """Reads folders as the test says, and reports as a worker does."""

    def __init__(self, name: str, folders: dict[str, str]) -> None:
        self.name = name
        self.connected = True
        self.folders = folders  # -> digest
        self.staged: list[str] = []
        self.reads: list[str] = []
        self.names: dict[str, str] = {}
        self.directories: list[AdapterDirectory] = []
        self.refuses = False
        self.gate: asyncio.Event | None = None

    @property
    def calls(self) -> FakeWorker:
        return self

    async def load_adapter(self, name: str, *, folder: str = "", digest: str = "") -> types_pb2.Adapter:
        await self._begin()
        if digest:
            self.staged.remove(digest)
            self.names[name] = digest
            self.report()
            return types_pb2.Adapter(name=name, digest=digest, rank=4)
        if self.refuses or folder not in self.folders:
            raise InvalidRequest("it does not fit", field="lora_path")
        self.reads.append(folder)
        self.staged.append(self.folders[folder])
        self.report()
        return types_pb2.Adapter(digest=self.folders[folder], rank=4)

    async def unload_adapter(self, *, name: str = "", digest: str = "") -> None:
        await self._begin()
        if digest:
            self.staged.remove(digest)
        else:
            del self.names[name]
        self.report()

    async def _begin(self) -> None:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()

    def report(self, *, is_welcome: bool = False) -> None:
        named = [types_pb2.Adapter(name=name, digest=digest, rank=4) for name, digest in self.names.items()]
        for directory in self.directories:
            directory.report(self, types_pb2.AdapterList(adapters=named), is_welcome)


def fleet(count: int = 2) -> tuple[AdapterDirectory, list[FakeWorker]]:
    workers = [FakeWorker(f"w{number}", {"/a": "A", "/a2": "A2"}) for number in range(count)]
    directory = AdapterDirectory(lambda: workers)
    for worker in workers:
        worker.directories.append(directory)
    return directory, workers


def digest(directory: AdapterDirectory, name: str = "a") -> str | None:
    found = directory.find(name)
    return None if found is None else found.digest


async def test_a_reload_means_the_new_adapter_once_every_worker_has_it_and_not_before() -> None:
    directory, workers = fleet()
    adapter, names = await directory.load("a", "/a")
    assert (adapter.digest, names) == ("A", ["w0", "w1"])
    workers[1].gate = asyncio.Event()
    task = asyncio.create_task(directory.load("a", "/a2"))
    await until(lambda: workers[0].staged == ["A2"])
    assert digest(directory) == "A"
    workers[1].gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await task
    assert digest(directory) == "A2"
    assert [worker.names for worker in workers] == [{"a": "A2"}] * 2
    assert all(not worker.staged for worker in workers)


async def test_where_one_worker_refuses_nothing_changes_on_any() -> None:
    directory, workers = fleet()
    await directory.load("a", "/a")
    workers[1].refuses = True
    with pytest.raises(InvalidRequest, match="does not fit"):
        await directory.load("a", "/a2")
    assert digest(directory) == "A"
    assert all(not worker.staged and worker.names == {"a": "A"} for worker in workers)


async def test_a_load_whose_caller_leaves_runs_to_its_end() -> None:
    directory, workers = fleet()
    workers[1].gate = asyncio.Event()
    task = asyncio.create_task(directory.load("a", "/a"))
    await until(lambda: workers[0].staged == ["A"])
    task.cancel()
    await asyncio.sleep(0)
    workers[1].gate.set()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(DEADLINE_S):
            await task
    assert all(not worker.staged and worker.names == {"a": "A"} for worker in workers)


async def test_different_content_on_two_hosts_is_refused() -> None:
    directory, workers = fleet()
    workers[1].folders = {"/a": "B"}
    with pytest.raises(InvalidRequest, match="different adapters"):
        await directory.load("a", "/a")
    assert digest(directory) is None
    assert all(not worker.staged for worker in workers)


async def test_a_worker_that_comes_back_without_it_gets_what_was_loaded() -> None:
    directory, workers = fleet()
    await directory.load("a", "/a")
    workers[1].names.clear()
    workers[1].report(is_welcome=True)
    await until(lambda: workers[1].names == {"a": "A"})
    assert digest(directory) == "A"
    await directory.close()


async def test_reports_while_adapters_are_brought_to_a_worker_have_none_read_again() -> None:
    directory, workers = fleet()
    names = [f"a{number}" for number in range(6)]
    for worker in workers:
        worker.folders = {f"/{name}": name for name in names}
    for name in names:
        await directory.load(name, f"/{name}")
    workers[1].names.clear()
    workers[1].reads.clear()
    workers[1].report(is_welcome=True)
    await until(lambda: len(workers[1].names) == len(names) and not directory._bringing)
    assert sorted(workers[1].reads) == [f"/{name}" for name in names]
    assert not workers[1].staged
    await directory.close()


async def test_what_another_router_loads_or_unloads_is_not_undone() -> None:
    first, workers = fleet()
    second = AdapterDirectory(lambda: workers)
    for worker in workers:
        worker.directories.append(second)
    await first.load("a", "/a")
    await second.load("a", "/a2")
    assert (digest(first), digest(second)) == ("A2", "A2")
    workers[1].names.clear()  # it starts again
    workers[1].report(is_welcome=True)
    await until(lambda: workers[1].names == {"a": "A2"} and not (first._bringing or second._bringing))
    await second.unload("a")
    workers[0].report(is_welcome=True)
    assert not first._bringing
    assert not second._bringing
    assert (digest(first), digest(second), workers[0].names) == (None, None, {})
    assert [len(worker.reads) for worker in workers] == [2, 3]


async def test_folders_that_have_changed_since_are_read_once_for_a_worker_that_comes_back() -> None:
    directory, workers = fleet()
    workers[1].folders["/b"] = workers[0].folders["/b"] = "B"
    await directory.load("a", "/a")
    await directory.load("b", "/b")
    workers[1].folders |= {"/a": "other", "/b": "another"}
    workers[1].names.clear()
    workers[1].reads.clear()
    workers[1].report(is_welcome=True)
    await until(lambda: not directory._bringing)
    assert (sorted(workers[1].reads), workers[1].names, workers[1].staged) == (["/a", "/b"], {}, [])


async def test_a_worker_that_comes_while_an_adapter_is_loaded_gets_it_too() -> None:
    directory, workers = fleet()
    late = workers[1]
    late.connected, workers[0].gate = False, asyncio.Event()
    loading = asyncio.create_task(directory.load("a", "/a"))
    await asyncio.sleep(0)
    late.connected = True
    late.report(is_welcome=True)
    workers[0].gate.set()
    await loading
    await until(lambda: late.names == {"a": "A"})
    await directory.close()


async def test_an_unloaded_name_is_unknown_at_once_and_no_worker_gets_it_again() -> None:
    directory, workers = fleet()
    await directory.load("a", "/a")
    assert await directory.unload("a") == ["w0", "w1"]
    assert digest(directory) is None
    workers[0].report()
    assert digest(directory) is None
    with pytest.raises(NotFound):
        await directory.unload("a")


async def test_without_workers_nothing_can_be_loaded() -> None:
    directory, _ = fleet(0)
    with pytest.raises(WorkerLost):
        await directory.load("a", "/a")


def test_a_name_keeps_its_meaning_until_no_worker_has_it_so() -> None:
    directory, workers = fleet(3)
    for worker, content in zip(workers, ("A", "A", "A"), strict=True):
        worker.names["a"] = content
        worker.report()
    for worker in workers[:2]:  # another router reloads
        worker.names["a"] = "A2"
        worker.report()
        assert digest(directory) == "A"
    directory.forget("w2")
    assert digest(directory) == "A2"
    assert [adapter.name for adapter in directory.all()] == ["a"]
