"""A worker's adapters on its event loop: those it knows by name, and the loads that bring them into slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.adapters.slots import HostTable, Room, SlotTable
from services.worker.adapters.source import AdapterSource, KnownAdapter, ReadAdapter
from shared.errors import ConfigError, Internal, NotFound, Overloaded, TandemError
from shared.kernels.lora.step import LoadedAdapter, PackedAdapter
from shared.tasks import end_task

logger = logging.getLogger(__name__)

MAX_NAMES = 4096
"""Most names of adapters on a worker."""
MAX_NAMELESS = 64
"""Most adapters that had a name and can still be brought back for a request that began under it."""


@dataclass(slots=True, eq=False)
class AdapterLease:
    """A request's hold on its adapter: while it is not released, the adapter stays once it is there."""

    digest: str
    slot: int = 0
    """0 until the adapter is there."""
    waited_s: float = 0.0
    """From the request for it until the adapter was there."""
    since: float = field(default_factory=time.perf_counter)
    _ready: asyncio.Future[None] | None = None
    _on_release: list[Callable[[], None]] = field(default_factory=list)

    async def ready(self) -> int:
        """The slot, once the adapter is there. Raises what its load failed with."""
        if self._ready is not None:
            await asyncio.shield(self._ready)
        return self.slot

    def release(self) -> None:
        """The request uses it no more, or will not; twice is fine."""
        while self._on_release:
            self._on_release.pop()()


class AdapterPool:
    """Runs on the event loop. Tensors are read and laid out in `AdapterSource`'s threads, beside the engine's steps;
    the engine thread is only handed what is ready."""

    def __init__(
        self,
        read: ReadAdapter,
        place: Callable[[int, PackedAdapter | None], None],
        slots: SlotTable,
        roots: tuple[Path, ...] = (),
        on_change: Callable[[], None] = lambda: None,
        host_bytes: int = 0,
    ) -> None:
        """`place` hands a slot's new content, or None, to the engine, in order with the sequences that use it.
        `roots`: folders from which `add` reads what is asked for later. `on_change`: what is known or resident has
        changed. `host_bytes`: most memory for copies, by which an adapter comes back into a slot."""
        self._source = AdapterSource(read, roots, HostTable(host_bytes, slots.uses))
        self._place = place
        self._slots = slots
        self.on_change = on_change
        self._known: dict[str, KnownAdapter] = {}
        self.names: dict[str, str] = {}
        """Name → digest."""
        self._staged: Counter[str] = Counter()  # times that one was read and has no name yet
        self._unloaded: set[str] = set()  # of these, none stays in a slot that no request uses
        self._nameless: OrderedDict[str, None] = OrderedDict()  # digests that had a name, the last one last
        self._waiting: dict[str, list[AdapterLease]] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # of the load that waits for room, in the order of requests
        self._freed = asyncio.Event()
        self.num_loads = 0
        self.load_s = 0.0
        """Time of all loads since start, from a request for one to its slot."""
        self.num_copied = 0
        """Number of these loads that needed no read."""

    def num_ready(self) -> dict[str, int]:
        """Adapters in slots, by whether a request uses them."""
        resident = self._slots.resident
        num_used = sum(self._slots.num_pins(digest) > 0 for digest in resident)
        return {"used": num_used, "unused": len(resident) - num_used}

    @property
    def num_evicted(self) -> int:
        """Adapters that made room for others since start."""
        return self._slots.num_evicted

    @property
    def resident(self) -> frozenset[str]:
        """Digests of those whose requests can start at once."""
        return self._slots.resident

    @property
    def loading(self) -> frozenset[str]:
        """Digests of those that come into a slot just now; one that waits for room is not among them."""
        return self._slots.loading

    @property
    def on_host(self) -> Collection[str]:
        """Digests of those that come into a slot without a read."""
        return self._source.copied

    @property
    def host_bytes(self) -> int:
        """Memory of all copies."""
        return self._source.copy_bytes

    @property
    def num_spare(self) -> int:
        """Further adapters, as large as the largest that is known, that can be loaded without waiting for the end of
        requests; none while one waits for that already."""
        most_bytes = max((known.num_bytes for known in self._known.values()), default=0)
        return max(0, self._slots.num_spare(most_bytes) - sum(digest not in self._slots for digest in self._waiting))

    def known(self) -> list[tuple[str, KnownAdapter]]:
        """(name, adapter) by name; an empty name for those that have none yet, or none any more."""
        named = [(name, self._known[digest]) for name, digest in sorted(self.names.items())]
        used = set(self.names.values())
        return named + [("", known) for digest, known in self._known.items() if digest not in used]

    def allowed(self, folder: str) -> Path:
        """See `AdapterSource`."""
        return self._source.allowed(folder)

    async def add(self, name: str, folder: Path) -> KnownAdapter:
        """Reads an adapter and gives it a name, which from then on means it and no other; it is brought into a slot
        where there is room. Raises ModelLoadError, ConfigError, Overloaded."""
        known = await self.stage(folder)
        self.name(name, known.digest)
        return known

    async def stage(self, folder: Path, *, is_given: bool = False) -> KnownAdapter:
        """Reads an adapter, which then can be used by its digest, until `name` or `unstage`; it is brought into a slot
        where there is room. `is_given`: it is what `allowed` has returned. Raises InvalidRequest,
        ModelLoadError, ConfigError."""
        loaded = await self._source.first(folder, is_given=is_given)
        known = KnownAdapter(loaded.digest, folder, loaded.rank, loaded.num_bytes, is_given)
        try:
            if not self._is_there(known.digest) and (room := self._slots.make_room(known.digest, known.num_bytes)):
                self._fill(room.emptied, room.slot, loaded)
        except ConfigError:
            if known.digest not in self._known:
                self._source.forget(known.digest)
            raise
        self._known[known.digest] = known
        self._unloaded.discard(known.digest)
        self._staged[known.digest] += 1
        logger.info("adapter %s: rank %d, %d bytes", known.digest, known.rank, known.num_bytes)
        self.on_change()
        return known

    def unstage(self, digest: str) -> None:
        """Forgets a staged adapter, which gets no name."""
        if self._staged[digest] > 0:
            self._staged[digest] -= 1
        self._unloaded.add(digest)
        self._forget_unused(digest)

    def name(self, name: str, digest: str) -> KnownAdapter:
        """Gives a staged adapter a name, which from then on means it and no other. Raises NotFound, Overloaded."""
        if digest not in self._known or not self._staged[digest]:
            raise NotFound(f"no adapter {digest} was read", field="digest", value=digest)
        if name not in self.names and len(self.names) >= MAX_NAMES:
            raise Overloaded(f"this worker has {MAX_NAMES} adapters", field="lora_name", limit=MAX_NAMES)
        before, self.names[name] = self.names.get(name), digest
        self._staged[digest] -= 1
        self._nameless.pop(digest, None)
        self._lost_name(before)
        logger.info("adapter %r is %s", name, digest)
        self.on_change()
        return self._known[digest]

    def remove(self, name: str) -> None:
        """The name means nothing any more; running requests keep their adapter. Raises NotFound."""
        if name not in self.names:
            raise NotFound(f"there is no adapter {name!r}", field="lora_name", value=name)
        digest = self.names.pop(name)
        self._unloaded.add(digest)
        self._lost_name(digest)
        logger.info("adapter %r is removed", name)
        self.on_change()

    def hold(self, digest: str) -> AdapterLease:
        """A request's hold on an adapter; its load begins now where it is not there. Raises Overloaded where this
        worker does not know it, which another may."""
        slot = self._slots.pin(digest)
        if slot is not None:
            return AdapterLease(digest, slot, _on_release=[lambda: self._unpin(digest)])
        if digest not in self._known:
            raise Overloaded(f"adapter {digest} is not known to this worker", field="adapter", value=digest)
        lease = AdapterLease(digest, _ready=asyncio.get_running_loop().create_future())
        waiting = self._waiting.setdefault(digest, [])
        waiting.append(lease)
        lease._on_release.append(lambda: self._leave(lease))
        if digest not in self._loads:
            self._loads[digest] = asyncio.create_task(self._bring(self._known[digest]), name=f"adapter-{digest}")
        return lease

    async def rest(self) -> None:
        """Empties all slots, and reads nothing until `wake`: there will be no weights to which adapters add. No request
        uses one. What is known stays so, and is read again for the next request."""
        resting = asyncio.create_task(self._source.rest())
        self._freed.set()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        await resting
        for digest in self._slots.resident:
            self._place(self._slots.drop(digest), None)
            self._forget_unused(digest)
        self.on_change()

    def wake(self) -> None:
        """Reads adapters again: the worker has weights."""
        self._source.wake()

    async def close(self) -> None:
        """Ends the loads. Twice is fine."""
        for task in list(self._loads.values()):
            await end_task(task)
        self._source.close()

    # --- inside

    async def _bring(self, known: KnownAdapter) -> None:
        """Brings an adapter into a slot for those that wait for it; returns when none waits."""
        digest, begun = known.digest, time.perf_counter()
        try:
            room = await self._room(known)
            if room is None:
                return
            await self._load(known, room)
            self.num_loads += 1
            self.load_s += time.perf_counter() - begun
            for lease in self._waiting.pop(digest, []):
                slot = self._slots.pin(digest)
                assert slot is not None
                lease.slot, lease.waited_s = slot, time.perf_counter() - lease.since
                lease._on_release[:] = [lambda: self._unpin(digest)]
                assert lease._ready is not None
                lease._ready.set_result(None)
        except Exception as error:
            failure = error if isinstance(error, TandemError) else Internal(f"{type(error).__name__}: {error}")
            logger.warning("adapter %s cannot be loaded: %s", digest, error, exc_info=failure is not error)
            for lease in self._waiting.pop(digest, []):
                assert lease._ready is not None
                lease._on_release.clear()
                lease._ready.set_exception(failure)
                lease._ready.exception()  # a request that left meanwhile does not look
        finally:  # together with what was decided last: a request that comes now begins another load
            del self._loads[digest]
            self._forget_unused(digest)
        self.on_change()

    async def _room(self, known: KnownAdapter) -> Room | None:
        """Waits its turn, and for room; None where no request waits for the adapter any more."""
        async with self._turn:
            while known.digest in self._waiting:
                room = self._slots.make_room(known.digest, known.num_bytes)
                if room is not None:
                    return room
                self._freed.clear()
                await self._freed.wait()
        return None

    async def _load(self, known: KnownAdapter, room: Room) -> None:
        self._empty(room.emptied)
        self.on_change()
        try:
            is_copied = known.digest in self._source.copied
            packed = await self._source.again(known)
            self.num_copied += is_copied
        except BaseException:
            self._slots.drop(known.digest)
            self._freed.set()
            raise
        self._place(room.slot, packed)
        self._slots.filled(known.digest)

    def _fill(self, emptied: tuple[tuple[str, int], ...], slot: int, loaded: LoadedAdapter) -> None:
        self._empty(emptied)
        self._place(slot, loaded.packed)
        self._slots.filled(loaded.digest)

    def _empty(self, emptied: tuple[tuple[str, int], ...]) -> None:
        for digest, slot in emptied:
            self._place(slot, None)
            self._forget_unused(digest)

    def _is_there(self, digest: str) -> bool:
        return digest in self._slots.resident or digest in self._loads

    def _leave(self, lease: AdapterLease) -> None:
        waiting = self._waiting.get(lease.digest, [])
        if lease in waiting:
            waiting.remove(lease)
        if lease._ready is not None and not lease._ready.done():
            lease._ready.set_result(None)
        if not waiting:
            self._waiting.pop(lease.digest, None)
            self._freed.set()

    def _unpin(self, digest: str) -> None:
        self._slots.unpin(digest)
        # Not at once: what ends the request's sequence in the engine may be queued behind this call.
        asyncio.get_running_loop().call_soon(self._after_unpin, digest)

    def _after_unpin(self, digest: str) -> None:
        self._forget_unused(digest)
        self._freed.set()

    def _lost_name(self, digest: str | None) -> None:
        """What a name meant is still known for a while: requests that began under it may come, from a queue or from a
        worker that was lost."""
        if digest is None or digest in self.names.values():
            return
        self._nameless[digest] = None
        self._nameless.move_to_end(digest)
        self._forget_unused(digest)
        if len(self._nameless) > MAX_NAMELESS:
            self._forget_unused(self._nameless.popitem(last=False)[0])

    def _forget_unused(self, digest: str) -> None:
        """Takes what no name means and no request uses out of its slot where it was unloaded, and drops it there where
        it lies in none."""
        if self._staged[digest] or digest in self.names.values():
            return
        if digest in self._loads or digest in self._waiting:
            return
        if digest in self._unloaded and not self._slots.num_pins(digest):
            self._source.forget(digest)
        if digest in self._unloaded and digest in self._slots.resident and not self._slots.num_pins(digest):
            self._place(self._slots.drop(digest), None)
            self._freed.set()
        if digest not in self._slots.resident and digest not in self._nameless:
            self._known.pop(digest, None)
            self._source.forget(digest)
            self._unloaded.discard(digest)
