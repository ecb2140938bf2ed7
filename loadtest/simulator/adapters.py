"""A simulated worker's adapters: the real table of slots, and loads that take a time, some at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.simulator.fleet import WorkerSpec, World
from services.worker.adapters.slots import SlotTable


@dataclass(slots=True)
class _Lease:
    adapter: str
    is_pinned: bool = False
    ready: list[Callable[[], None]] = field(default_factory=list)


class SimAdapters:
    """What `services/worker/adapters/pool.py` does: a load begins with its request, and waits its turn and for room."""

    def __init__(self, world: World, spec: WorkerSpec, changed: Callable[[], None]) -> None:
        """`changed`: some adapter has become ready or left."""
        self._world, self._spec, self._changed = world, spec, changed
        self._slots = SlotTable(spec.adapter_slots, spec.adapter_slots)
        self._leases: dict[str, _Lease] = {}
        self._turns: deque[str] = deque()
        """Adapters that wait for their load."""
        self._loading: set[str] = set()
        self.num_loads = 0
        if not spec.adapter_load_s:
            self._slots = SlotTable(len(world.adapters), len(world.adapters))
            for adapter in world.adapters:  # all resident
                self._slots.make_room(adapter, 1)
                self._slots.filled(adapter)

    def listed(self) -> Mapping[str, bool]:
        """Adapter → whether it is ready."""
        resident = self._slots.resident
        return {adapter: adapter in resident for adapter in self._world.adapters}

    def hold(self, request: str, adapter: str) -> None:
        """The request needs its adapter until it is released; twice is once."""
        if not adapter or request in self._leases:
            return
        lease = self._leases[request] = _Lease(adapter)
        lease.is_pinned = self._slots.pin(adapter) is not None
        if not lease.is_pinned and adapter not in self._turns and adapter not in self._loading:
            self._turns.append(adapter)
            self._next()

    def when_ready(self, request: str, call: Callable[[], None]) -> None:
        """Calls once the request's adapter is there: at once without one."""
        lease = self._leases.get(request)
        if lease is None or lease.is_pinned:
            call()
        else:
            lease.ready.append(call)

    def release(self, request: str) -> None:
        """The request has ended here."""
        lease = self._leases.pop(request, None)
        if lease is not None:
            self._slots.unpin(lease.adapter)
            self._next()

    def check_unused(self) -> None:
        """Asserts that no request holds anything."""
        self._slots.check()
        assert not self._leases, f"{len(self._leases)} leases are left"
        assert not any(self._slots.num_pins(adapter) for adapter in self._world.adapters), "an adapter is pinned"

    def _next(self) -> None:
        while self._turns and len(self._loading) < self._spec.adapter_readers:
            if self._slots.make_room(self._turns[0], 1) is None:
                return
            adapter = self._turns.popleft()
            self._loading.add(adapter)
            self.num_loads += 1
            self._changed()
            self._world.clock.after(self._spec.adapter_load_s, self._loaded, adapter)

    def _loaded(self, adapter: str) -> None:
        self._loading.remove(adapter)
        self._slots.filled(adapter)
        self._changed()
        for lease in list(self._leases.values()):
            if lease.adapter == adapter and not lease.is_pinned:
                lease.is_pinned = self._slots.pin(adapter) is not None
                ready, lease.ready = lease.ready, []
                for call in ready:
                    call()
        self._next()
