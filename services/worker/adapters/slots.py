"""Which adapters lie in a worker's slots, and which have a copy on the host. Pure policy: plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.adapters.uses import Uses
from shared.errors import ConfigError


@dataclass(slots=True)
class _Held:
    slot: int
    num_bytes: int
    is_loading: bool
    num_pins: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """A slot that is set aside for an adapter, and the slots that were emptied for it."""

    slot: int
    emptied: tuple[tuple[str, int], ...]
    """(digest, slot) of each."""


class SlotTable:
    """Slots from 1 on, under a budget of bytes. An adapter that no request pins stays until its room is needed, then
    the one that was used least goes first, see `Uses`; one that is pinned, or is being loaded, stays."""

    def __init__(self, num_slots: int, budget_bytes: int) -> None:
        self._free = list(range(num_slots, 0, -1))
        self._budget_bytes = budget_bytes
        self._held: dict[str, _Held] = {}  # by digest
        self.uses = Uses(num_slots)
        """Uses of all adapters, those in no slot among them."""
        self.num_evicted = 0

    def __contains__(self, digest: object) -> bool:
        """Whether it has a slot, filled or not."""
        return digest in self._held

    @property
    def used_bytes(self) -> int:
        """Bytes of all adapters in slots, those that are being loaded among them."""
        return sum(held.num_bytes for held in self._held.values())

    @property
    def resident(self) -> frozenset[str]:
        """Digests of those that can be used now. From any thread: the metrics page asks for them."""
        held_now = self._held.copy()  # atomic: others come and go meanwhile
        return frozenset(digest for digest, held in held_now.items() if not held.is_loading)

    @property
    def loading(self) -> frozenset[str]:
        """Digests of those that have a slot, which is not filled yet."""
        return frozenset(digest for digest, held in self._held.items() if held.is_loading)

    def num_spare(self, most_bytes: int) -> int:
        """Further adapters of up to `most_bytes` each that can come now: there are as many slots, and bytes, that are
        free or whose adapter no request uses."""
        fixed = [held.num_bytes for held in self._held.values() if held.num_pins or held.is_loading]
        num_slots = len(self._free) + len(self._held) - len(fixed)
        return min(num_slots, (self._budget_bytes - sum(fixed)) // max(1, most_bytes))

    def num_pins(self, digest: str) -> int:
        """Requests that use it."""
        held = self._held.get(digest)
        return 0 if held is None else held.num_pins

    def pin(self, digest: str) -> int | None:
        """Its slot, for one more request; None where it is not there, or not yet."""
        held = self._held.get(digest)
        if held is None or held.is_loading:
            return None
        held.num_pins += 1
        self.uses.add(digest)
        return held.slot

    def unpin(self, digest: str) -> None:
        """One request less."""
        held = self._held[digest]
        assert held.num_pins > 0, f"{digest} is not pinned"
        held.num_pins -= 1

    def make_room(self, digest: str, num_bytes: int) -> Room | None:
        """Sets a slot aside for an adapter that is not there; None, and nothing changes, while those that are pinned
        leave no room. Raises ConfigError (`adapter_bytes`) for one that never fits."""
        assert digest not in self._held, f"{digest} is there"
        if num_bytes > self._budget_bytes:
            raise ConfigError(
                f"an adapter takes {num_bytes} bytes, the worker keeps {self._budget_bytes} bytes of adapters in all",
                field="adapter_bytes",
                value=num_bytes,
                limit=self._budget_bytes,
            )
        free_bytes, free_slots = self._budget_bytes - self.used_bytes, len(self._free)
        leaving: list[str] = []
        unused = (other for other, held in self._held.items() if not held.num_pins and not held.is_loading)
        for other in sorted(unused, key=self.uses.of):
            if free_slots and free_bytes >= num_bytes:
                break
            held = self._held[other]
            leaving.append(other)
            free_bytes, free_slots = free_bytes + held.num_bytes, free_slots + 1
        if not free_slots or free_bytes < num_bytes:
            return None
        emptied = tuple((other, self.drop(other)) for other in leaving)
        self.num_evicted += len(emptied)
        slot = self._free.pop()
        self._held[digest] = _Held(slot, num_bytes, is_loading=True)
        return Room(slot, emptied)

    def filled(self, digest: str) -> None:
        """The adapter is resident for which `make_room` set a slot aside."""
        self._held[digest].is_loading = False

    def drop(self, digest: str) -> int:
        """Takes one out that no request uses, loaded or not; returns its slot, which is free."""
        held = self._held.pop(digest)
        assert not held.num_pins, f"{digest} is pinned"
        self._free.append(held.slot)
        return held.slot

    def check(self) -> None:
        """Asserts that every slot is either free or some adapter's, and that they keep to the budget."""
        used = [held.slot for held in self._held.values()]
        assert len({*used, *self._free}) == len(used) + len(self._free), "a slot is there twice"
        assert self.used_bytes <= self._budget_bytes, "more bytes than the budget"


class HostTable:
    """The adapters of which the host's memory keeps a copy, in slots or not: those that were used most, within a budget
    of bytes."""

    def __init__(self, budget_bytes: int, uses: Uses) -> None:
        self._budget_bytes = budget_bytes
        self._uses = uses
        self._held: dict[str, int] = {}  # digest -> bytes

    def __contains__(self, digest: object) -> bool:
        return digest in self._held

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(self._held.values())

    def keep(self, digest: str, num_bytes: int) -> tuple[str, ...]:
        """Takes a copy in, which counts as used once more than is on record. Returns the digests whose copies are to be
        dropped: those used least, or this one alone where it does not stay."""
        held = self._held | {digest: num_bytes}
        left_bytes, leaving = sum(held.values()), list[str]()
        for other in sorted(held, key=lambda other: self._uses.of(other, 1 if other == digest else 0)):
            if left_bytes <= self._budget_bytes:
                break
            left_bytes -= held[other]
            leaving.append(other)
        if num_bytes > self._budget_bytes or digest in leaving:  # others make no room for one that does not stay
            self._held.pop(digest, None)
            return (digest,)
        self._held = {other: size for other, size in held.items() if other not in leaving}
        return tuple(leaving)

    def drop(self, digest: str) -> None:
        """Drops the adapter's copy in host memory, if there is one."""
        self._held.pop(digest, None)
