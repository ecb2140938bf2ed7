"""The adapters of a worker as its routers use them: what they have read, named and removed, and what reports list."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from services.worker.adapters.adapter_pool import AdapterLease, AdapterPool
from services.worker.adapters.source import KnownAdapter
from services.worker.session import Session
from shared.errors import ConfigError, Internal, InvalidRequest, ModelLoadError, NotFound, Overloaded, TandemError
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

logger = logging.getLogger(__name__)


class RouterAdapters:
    """Carries out commands about adapters, and writes the adapters into messages. On the event loop."""

    def __init__(self, pool: AdapterPool | None, worker_name: str) -> None:
        """`pool`: None where the worker has no adapters."""
        self._pool = pool
        self._worker_name = worker_name
        self._staged: dict[Session, Counter[str]] = {}  # of each open session, what it had read and did not name yet
        self.are_due = False
        """Whether the list has changed since the last report."""

    def opened(self, session: Session) -> None:
        """A router is connected."""
        self._staged[session] = Counter()

    def closed(self, session: Session) -> None:
        """The router is gone: what it had read and did not name is given up."""
        for digest in self._staged.pop(session, Counter()).elements():
            assert self._pool is not None
            self._pool.unstage(digest)

    def hold(self, digest: str) -> AdapterLease | None:
        """A request's hold on the adapter that it names, which begins to load where it is not there; None for none.
        Raises Overloaded where this worker does not know it."""
        if not digest:
            return None
        if self._pool is None:
            raise Overloaded(f"worker {self._worker_name} has no adapters", field="adapter")
        return self._pool.hold(digest)

    def listed(self) -> types_pb2.AdapterList | None:
        """All adapters that have names; None without a pool."""
        if self._pool is None:
            return None
        places = _Places.of(self._pool)
        return types_pb2.AdapterList(adapters=[_to_proto(name, known, places) for name, known in self._pool.known()])

    def report(self, load: types_pb2.Load) -> None:
        """Writes into a report how many further adapters could be loaded, and all adapters where these have
        changed since the report before."""
        if self._pool is not None:
            load.adapter_room = self._pool.num_spare
        if self.are_due and (adapters := self.listed()) is not None:
            self.are_due = False
            load.adapters.CopyFrom(adapters)

    async def change(self, session: Session, command: worker_pb2.LoadAdapter | worker_pb2.UnloadAdapter) -> None:
        """Carries the command out and answers it, with an error where that failed."""
        answer = worker_pb2.AdapterChanged(call=command.call)
        try:
            if self._pool is None:
                raise InvalidRequest(f"worker {self._worker_name} takes no adapters", field="lora_path")
            if isinstance(command, worker_pb2.UnloadAdapter):
                if not command.digest:
                    self._pool.remove(command.name)
                elif self._has_staged(session, command.digest):
                    self._staged[session][command.digest] -= 1
                    self._pool.unstage(command.digest)
            else:
                known = await self._load(session, command, self._pool)
                answer.adapter.CopyFrom(_to_proto(command.name, known, _Places.of(self._pool)))
        except Exception as error:
            known_error = error if isinstance(error, TandemError) else Internal(f"{type(error).__name__}: {error}")
            if isinstance(error, ModelLoadError | ConfigError):  # what the caller named cannot be served
                known_error = InvalidRequest(error.message, **{**error.details, "field": "lora_path"})
            logger.warning("adapter %r of router %s: %s", command.name, session.router_name, error)
            answer.error.CopyFrom(to_proto(known_error))
        session.send(adapter_changed=answer)

    async def _load(self, session: Session, command: worker_pb2.LoadAdapter, pool: AdapterPool) -> KnownAdapter:
        """Reads an adapter for a session, or names what was read for it; what has no name when the session ends is
        given up."""
        if command.digest:
            if not self._has_staged(session, command.digest):
                raise NotFound(f"no adapter {command.digest} was read", field="digest", value=command.digest)
            known = pool.name(command.name, command.digest)
            self._staged[session][command.digest] -= 1
            return known
        # Not on the event loop: to follow links on a network mount may take as long as it likes.
        known = await pool.stage(await asyncio.to_thread(pool.allowed, command.folder), is_given=True)
        if session in self._staged:
            self._staged[session][known.digest] += 1
        else:
            pool.unstage(known.digest)
        return known

    def _has_staged(self, session: Session, digest: str) -> bool:
        return session in self._staged and self._staged[session][digest] > 0


class _Places(NamedTuple):
    """Which adapters are where, by digest."""

    resident: Collection[str]
    loading: Collection[str]
    on_host: Collection[str]

    @classmethod
    def of(cls, pool: AdapterPool) -> _Places:
        """As it is now."""
        return cls(pool.resident, pool.loading, pool.on_host)


def _to_proto(name: str, known: KnownAdapter, places: _Places) -> types_pb2.Adapter:
    """An adapter as routers get it."""
    return types_pb2.Adapter(
        name=name,
        digest=known.digest,
        rank=known.rank,
        num_bytes=known.num_bytes,
        resident=known.digest in places.resident,
        on_host=known.digest in places.on_host,
        loading=known.digest in places.loading,
    )
