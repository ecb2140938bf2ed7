"""Where a worker's adapters come from: folders that it may read, and copies in the host's memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from services.worker.adapters.slots import HostTable
from shared.errors import Draining, InvalidRequest, ModelLoadError
from shared.kernels.cpu.beside_steps import work_beside_steps
from shared.kernels.lora.step import HostCopy, LoadedAdapter, PackedAdapter
from shared.model.adapters.adapter import WEIGHTS_FILE
from shared.model.config.folder import ADAPTER_FILE

MAX_READERS, CORES_OF_READER = 4, 8
"""Adapters that are read at once, at most, and cores for each: loads that come together wait for each other less."""

_From = TypeVar("_From")
_Found = TypeVar("_Found")


class ReadAdapter(Protocol):
    """Reads a folder and lays it out, in a thread of the pool's. Raises ModelLoadError."""

    def __call__(self, folder: Path) -> LoadedAdapter: ...


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """What a worker knows of an adapter, wherever its tensors are."""

    digest: str
    folder: Path
    rank: int
    num_bytes: int
    is_given: bool = False
    """A client has named the folder: before each read it must lie in one of the roots."""


class AdapterSource:
    """Runs on the event loop. Folders are read, and tensors laid out, in threads beside the engine's steps, one of them
    where cores are few; copies are laid out in another one, and wait for no read."""

    def __init__(self, read: ReadAdapter, roots: tuple[Path, ...], host: HostTable) -> None:
        """`roots`: folders from which clients may name some. `host`: which adapters a copy is kept of."""
        self._read = read
        self._roots = tuple(root.resolve() for root in roots)
        self._host = host
        num_readers = max(1, min(MAX_READERS, len(os.sched_getaffinity(0)) // CORES_OF_READER))
        self._readers = ThreadPoolExecutor(num_readers, "adapters", initializer=work_beside_steps)
        self._copier = ThreadPoolExecutor(1, "adapter-copies", initializer=work_beside_steps)
        self._running: set[Future[Any]] = set()
        self._copies: dict[str, HostCopy] = {}  # by digest, those of `_host`
        self._rests = False

    @property
    def copied(self) -> Collection[str]:
        """Digests of those that are laid out without a read."""
        return self._copies.keys()

    @property
    def copy_bytes(self) -> int:
        """Memory of all copies."""
        return self._host.used_bytes

    def allowed(self, folder: str) -> Path:
        """A folder that a client named, if it and its files lie in one of the roots, links followed. Nothing is opened.
        Raises InvalidRequest (`lora_path`)."""
        if not self._roots:
            raise InvalidRequest(
                "adapters cannot be loaded into this worker: its adapter_folders is empty", field="lora_path"
            )
        try:
            found = Path(folder).resolve()
            files = {file: (found / file).resolve() for file in (ADAPTER_FILE, WEIGHTS_FILE)}
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidRequest(f"lora_path is no path: {error}", field="lora_path") from None
        if not Path(folder).is_absolute() or not any(found.is_relative_to(root) for root in self._roots):
            raise InvalidRequest(
                "lora_path must be an absolute path in one of the worker's adapter_folders", field="lora_path"
            )
        for file, behind in files.items():
            if not any(behind.is_relative_to(root) for root in self._roots):
                raise InvalidRequest(
                    f"lora_path: its {file} is a link out of the worker's adapter_folders", field="lora_path"
                )
            if os.path.islink(behind):  # from Python 3.13 on `resolve` does not raise where links go round in a circle
                raise InvalidRequest(f"lora_path is no path: its {file} is a link to itself", field="lora_path")
        return found

    async def first(self, folder: Path, *, is_given: bool) -> LoadedAdapter:
        """Reads a folder, for the first time: what it holds is to be known. Raises InvalidRequest, ModelLoadError,
        ConfigError, and Draining where there are no weights, or none any more."""
        return self._kept(await self._run(self._readers, self._read_given if is_given else self._read, folder))

    async def again(self, known: KnownAdapter) -> PackedAdapter:
        """Lays an adapter out by its copy, or reads it. Raises ModelLoadError, Draining."""
        copy = self._copies.get(known.digest)
        if copy is not None:
            return await self._run(self._copier, _lay_out, copy)
        loaded = await self._run(self._readers, self._read_again if known.is_given else self._read, known.folder)
        if loaded.digest != known.digest:
            raise ModelLoadError(
                f"{known.folder} holds another adapter than when it was named: load it again",
                field="adapter",
                value=known.digest,
            )
        return self._kept(loaded).packed

    def forget(self, digest: str) -> None:
        """No copy of it is kept any longer; fine where there is none."""
        self._host.drop(digest)
        self._copies.pop(digest, None)

    async def rest(self) -> None:
        """Nothing is read until `wake`, and no copies are kept; returns when no thread is at any."""
        self._rests = True
        # Also reads whose requests were cancelled.
        await asyncio.gather(*map(asyncio.wrap_future, tuple(self._running)), return_exceptions=True)
        for digest in tuple(self._copies):
            self.forget(digest)

    def wake(self) -> None:
        """Reads adapters again: the worker has weights."""
        self._rests = False

    def close(self) -> None:
        """Cancels the reads that have not begun. Twice is fine."""
        for threads in (self._readers, self._copier):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, threads: ThreadPoolExecutor, call: Callable[[_From], _Found], source: _From) -> _Found:
        if not self._rests:
            running = threads.submit(call, source)
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            found = await asyncio.wrap_future(running)
        if self._rests:
            raise Draining("this worker has no weights just now", field="adapter")
        return found

    def _read_given(self, folder: Path) -> LoadedAdapter:
        return self._read(self.allowed(str(folder)))

    def _read_again(self, folder: Path) -> LoadedAdapter:
        try:
            return self._read_given(folder)
        except InvalidRequest as error:  # the request that waits has not named it
            raise ModelLoadError(
                f"{folder} is not what it was when it was named: {error.message}", field="adapter"
            ) from error

    def _kept(self, loaded: LoadedAdapter) -> LoadedAdapter:
        """Keeps its copy, as far as there is room for it."""
        if loaded.copy is not None and loaded.digest not in self._copies:
            self._copies[loaded.digest] = loaded.copy
            for digest in self._host.keep(loaded.digest, loaded.copy.num_bytes):
                del self._copies[digest]
        return loaded


def _lay_out(copy: HostCopy) -> PackedAdapter:
    """In a function, which holds the copy meanwhile: a group's ranks keep their parts of it for as long."""
    return copy.lay_out()
