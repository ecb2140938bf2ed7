"""A simulated worker's adapters: the real tables of slots and copies; reads and copies take a time, some at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.simulator.fleet import WorkerSpec, World
from services.router.placement.views import Tier
from services.worker.adapters.slots import HostTable, SlotTable


@dataclass(slots=True)
class _Lease:
    adapter: str
    is_pinned: bool = False
    ready: list[Callable[[], None]] = field(default_factory=list)


class SimAdapters:
    """`AdapterPool` of a worker in virtual time: a load begins with its request, and waits its turn and for room."""

    def __init__(self, world: World, spec: WorkerSpec, changed: Callable[[], None]) -> None:
        """`changed`: some adapter has become ready or left."""
        self._world, self._spec, self._changed = world, spec, changed
        self._slots = SlotTable(spec.adapter_slots, spec.adapter_slots)
        self._leases: dict[str, _Lease] = {}
        self._turns: deque[str] = deque()
        """Adapters that wait for room."""
        self._loading: set[str] = set()
        self._readers_free_s = [0.0] * spec.adapter_readers  # when each thread that reads has done what it was given
        self._copier_free_s = 0.0
        self.num_loads = 0
        self.num_reads = 0
        """Loads without a copy in the host's memory."""
        self._host = HostTable(spec.adapter_copies, self._slots.uses)
        for adapter in world.adapters:  # all were read when they got their names
            self._host.keep(adapter, 1)
        if not spec.adapter_load_s:
            num_slots = max(1, len(world.adapters))
            self._slots = SlotTable(num_slots, num_slots)
            for adapter in world.adapters:  # all resident
                self._slots.make_room(adapter, 1)
                self._slots.filled(adapter)

    def listed(self) -> Mapping[str, Tier]:
        """Adapter → where it is."""
        resident = self._slots.resident
        return {adapter: self._tier(adapter, adapter in resident) for adapter in self._world.adapters}

    def _tier(self, adapter: str, is_ready: bool) -> Tier:
        return Tier.READY if is_ready else Tier.HOST if adapter in self._host else Tier.FOLDER

    @property
    def loading(self) -> frozenset[str]:
        """Adapters that come into a slot just now."""
        return self._slots.loading

    @property
    def room(self) -> int:
        """Further adapters that could be loaded at once."""
        return max(0, self._slots.num_spare(1) - len(self._turns))

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
        while self._turns and self._slots.make_room(self._turns[0], 1) is not None:
            adapter = self._turns.popleft()
            self._loading.add(adapter)
            self.num_loads += 1
            self._changed()
            self._world.clock.at(self._loaded_s(adapter), self._loaded, adapter)

    def _loaded_s(self, adapter: str) -> float:
        """Seconds of the clock at which an adapter is resident whose load begins now."""
        now_s, spec = self._world.clock.now_s, self._spec
        if adapter in self._host:
            self._copier_free_s = max(now_s, self._copier_free_s) + spec.adapter_copy_s
            return self._copier_free_s
        self.num_reads += 1
        first = min(range(spec.adapter_readers), key=self._readers_free_s.__getitem__)
        self._readers_free_s[first] = max(now_s, self._readers_free_s[first]) + spec.adapter_load_s
        return self._readers_free_s[first]

    def _loaded(self, adapter: str) -> None:
        self._loading.remove(adapter)
        self._host.keep(adapter, 1)
        self._slots.filled(adapter)
        self._changed()
        for lease in list(self._leases.values()):
            if lease.adapter == adapter and not lease.is_pinned:
                lease.is_pinned = self._slots.pin(adapter) is not None
                ready, lease.ready = lease.ready, []
                for call in ready:
                    call()
        self._next()
