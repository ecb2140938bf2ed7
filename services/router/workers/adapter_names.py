"""The adapters of one model over its workers: what names mean, and how a name gets another meaning."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from services.router.placement.views import NamedAdapter
from services.router.workers.link import WorkerLink
from shared.errors import Internal, InvalidRequest, NotFound, TandemError, WorkerLost
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.tasks import end_task, unbroken

logger = logging.getLogger(__name__)


class AdapterDirectory:
    """A name means one digest at a time, the same for every request of this router.

    Workers report what they have. A name keeps its meaning while any worker has it so; else it takes the one that most
    have. What an administrator loads through this router it also brings to workers that connect later, until another
    router gives the name another meaning or unloads it. Runs on the event loop.
    """

    def __init__(self, workers: Callable[[], Iterable[WorkerLink]]) -> None:
        """`workers`: the links that there are, connected or not."""
        self._workers = workers
        self._reported: dict[str, dict[str, NamedAdapter]] = {}  # by worker, then by name
        self._named: dict[str, NamedAdapter] = {}
        self._loaded: dict[str, tuple[str, str]] = {}  # name -> (folder, digest), of those that were loaded here
        self._changing = asyncio.Lock()
        self._bringing: dict[tuple[str, str, str], asyncio.Task[None]] = {}  # by worker, name and digest

    def find(self, name: str) -> NamedAdapter | None:
        """What a name means now; None for an unknown one."""
        return self._named.get(name)

    def all(self) -> list[NamedAdapter]:
        """All adapters, in the order of their names."""
        return [self._named[name] for name in sorted(self._named)]

    def report(self, worker: WorkerLink, adapters: types_pb2.AdapterList, is_welcome: bool) -> None:
        """A worker's adapters, all of them; `is_welcome`: with these its session begins. Only then it gets those that
        it lacks: a change that is seen later is another router's."""
        found = {item.name: _named(item.name, item) for item in adapters.adapters if item.name}
        before = {} if is_welcome else self._reported.get(worker.name, {})
        self._reported[worker.name] = found
        for name, (_, digest) in list(self._loaded.items()):
            if _has(before, name, digest) and not _has(found, name, digest):
                del self._loaded[name]
        self._settle()
        if is_welcome:
            self._bring_missing(worker)

    def _bring_missing(self, worker: WorkerLink) -> None:
        found = self._reported.get(worker.name, {})
        for name, (folder, digest) in self._loaded.items():
            key = (worker.name, name, digest)
            if not _has(found, name, digest) and key not in self._bringing:
                self._bringing[key] = asyncio.create_task(self._bring(worker, name, folder, digest))

    def forget(self, worker: str) -> None:
        """The worker is gone for good."""
        if self._reported.pop(worker, None) is not None:
            self._settle()

    async def load(
        self, name: str, folder: str, admit: Callable[[NamedAdapter], None] = lambda _: None
    ) -> tuple[NamedAdapter, list[str]]:
        """Brings an adapter to every connected worker, then gives it the name: requests that come when this has
        returned get it. Returns it, and the workers that have it. Raises what a worker refuses it with, or `admit` once
        it is read, and WorkerLost without any worker; the name means then what it meant. It runs to its end where its
        caller is gone: workers would keep what they read."""
        async with self._changing:
            return await unbroken(self._load(name, folder, admit))

    async def _load(
        self, name: str, folder: str, admit: Callable[[NamedAdapter], None]
    ) -> tuple[NamedAdapter, list[str]]:
        workers = self._connected()
        answers = await asyncio.gather(
            *(worker.calls.load_adapter(name, folder=folder) for worker in workers), return_exceptions=True
        )
        refused = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        read = {
            worker.name: answer
            for worker, answer in zip(workers, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        digests = {answer.digest for answer in read.values()}
        if refused is None and len(digests) > 1:
            refused = InvalidRequest(
                f"lora_path holds different adapters on workers {', '.join(read)}", field="lora_path"
            )
        if refused is None:
            try:
                admit(_named(name, next(iter(read.values()))))
            except TandemError as error:
                refused = error
        if refused is not None:
            undo = [
                worker.calls.unload_adapter(digest=read[worker.name].digest)
                for worker in workers
                if worker.name in read
            ]
            await asyncio.gather(*undo, return_exceptions=True)
            raise refused if isinstance(refused, TandemError) else Internal(f"{type(refused).__name__}: {refused}")
        adapter = next(iter(read.values()))
        self._loaded[name] = (folder, adapter.digest)
        named = self._named[name] = _named(name, adapter)  # workers know the digest
        naming = [worker.calls.load_adapter(name, digest=adapter.digest) for worker in workers]
        await self._on_all(workers, naming)
        for worker in self._workers():  # one that has come meanwhile
            if worker.connected and worker not in workers:
                self._bring_missing(worker)
        logger.info("adapter %r is %s", name, adapter.digest)
        return named, [worker.name for worker in workers]

    async def unload(self, name: str) -> list[str]:
        """The name is unknown at once; running requests keep their adapter. Returns the workers that had it. Raises
        NotFound."""
        async with self._changing:
            if name not in self._named:
                raise NotFound(f"there is no adapter {name!r}", field="lora_name", value=name)
            had = [worker for worker in self._connected() if name in self._reported.get(worker.name, {})]
            self._loaded.pop(name, None)
            del self._named[name]
            for reported in self._reported.values():
                reported.pop(name, None)
            await self._on_all(had, [worker.calls.unload_adapter(name=name) for worker in had])
            logger.info("adapter %r is unloaded", name)
            return [worker.name for worker in had]

    async def close(self) -> None:
        """Ends what is under way."""
        for task in list(self._bringing.values()):
            await end_task(task)

    async def _on_all(self, workers: Sequence[WorkerLink], calls: Sequence[Awaitable[object]]) -> None:
        """One that is lost meanwhile reports anew when it comes back."""
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("worker %s: %s", worker.name, answer)

    async def _bring(self, worker: WorkerLink, name: str, folder: str, digest: str) -> None:
        try:
            found = await worker.calls.load_adapter(name, folder=folder)
            if self._loaded.get(name) != (folder, digest) or found.digest != digest:
                await worker.calls.unload_adapter(digest=found.digest)
                return
            await worker.calls.load_adapter(name, digest=digest)
        except TandemError as error:
            logger.warning("adapter %r cannot be brought to worker %s: %s", name, worker.name, error)
        finally:
            self._bringing.pop((worker.name, name, digest), None)

    def _connected(self) -> list[WorkerLink]:
        found = [worker for worker in self._workers() if worker.connected]
        if not found:
            raise WorkerLost("no worker is connected", retry_after_s=1.0)
        return found

    def _settle(self) -> None:
        meanings: dict[str, Counter[NamedAdapter]] = {}
        for reported in self._reported.values():
            for name, adapter in reported.items():
                meanings.setdefault(name, Counter())[adapter] += 1
        before = self._named
        self._named = {
            name: before[name] if name in before and before[name] in found else _most(found)
            for name, found in meanings.items()
        }
        for name in self._loaded.keys() & before.keys():
            self._named.setdefault(name, before[name])


def _has(found: Mapping[str, NamedAdapter], name: str, digest: str) -> bool:
    return name in found and found[name].digest == digest


def _named(name: str, adapter: types_pb2.Adapter) -> NamedAdapter:
    return NamedAdapter(name, adapter.digest, adapter.rank, adapter.num_bytes)


def _most(found: Counter[NamedAdapter]) -> NamedAdapter:
    return max(found, key=lambda adapter: (found[adapter], adapter.digest))
