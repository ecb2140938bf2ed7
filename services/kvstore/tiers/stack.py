"""Host memory over disk: blocks are offered to both and read from the faster one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.kvstore.tiers.order import PLAIN, Keep
from services.kvstore.tiers.pins import Pin, PinBook
from services.kvstore.tiers.shared_disk import SharedDiskTier
from services.kvstore.tiers.tier import BlockTier
from shared.errors import InvalidRequest, NotFound, StoreUnavailable
from shared.kv_index.holders import Tier

logger = logging.getLogger(__name__)

READ_RETRY_S = 5.0
"""A tier that could not be read counts as empty for this long. Seconds."""


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that was read and matches its checksum."""

    checksum: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class PinState:
    """A pin and its present state."""

    pin: Pin
    num_held: int  # of its blocks, in any tier
    tiers: tuple[Tier, ...]  # that pin its blocks


class TierStack:
    """The tiers of one node, fastest first. Each admits and evicts independently.

    Not thread-safe, and may block on a disk, like the tiers. When a tier fails, the others continue; that is logged
    once, until a call on the tier works again.
    """

    def __init__(self, tiers: Sequence[BlockTier], pin_folder: Path | None = None) -> None:
        """Owns the tiers. With a folder, pins outlive the process."""
        self.tiers: list[BlockTier] = list(tiers)
        self.failed: dict[Tier, StoreUnavailable] = {}
        """Tiers whose last call failed."""
        self._unread_until: dict[Tier, float] = {}
        self._pins = PinBook(pin_folder)

    def load_pins(self) -> None:
        """To be called before the tiers start, so that they keep pinned blocks. Raises ConfigError for a bad file."""
        self._pins.load()
        for tier in self.tiers:
            self._apply_pins(tier)

    def add_fastest(self, tier: BlockTier) -> None:
        """Adds a tier above all others."""
        self.tiers.insert(0, tier)
        self._apply_pins(tier)

    def wanting(self, block_hash: bytes, num_bytes: int, tenant: str = "", keep: Keep = PLAIN) -> tuple[BlockTier, ...]:
        """The tiers that want a block; empty if one of them holds it. All record the offer."""
        wanting = tuple(tier for tier in self.tiers if tier.wants(block_hash, num_bytes, tenant, keep))
        return () if self.holds(block_hash) else wanting

    def holds(self, block_hash: bytes) -> bool:
        """Whether a readable tier holds the block."""
        return any(tier.holds(block_hash) for tier in self.tiers if self._readable(tier))

    def put(
        self,
        block_hash: bytes,
        block: memoryview,
        checksum: int,
        tiers: Sequence[BlockTier],
        tenant: str = "",
        keep: Keep = PLAIN,
    ) -> None:
        """Stores a block in these tiers. Raises ValueError if it does not match the checksum."""
        for tier in tiers:
            try:
                tier.put(block_hash, block, checksum, tenant, keep)
            except StoreUnavailable as error:
                self._fail(tier, error)
            else:
                self._recover(tier)

    def read(self, block_hash: bytes, into: memoryview) -> FoundBlock | None:
        """Reads a block from the fastest tier that has it undamaged. One read from a slower tier is copied into the
        faster ones that want it."""
        for tier in self.tiers:
            if not self._readable(tier):
                continue
            if not tier.holds(block_hash):
                tier.counters.num_misses += 1
                continue
            tenant, keep = tier.whose(block_hash)
            try:
                checksum = tier.read(block_hash, into)
            except StoreUnavailable as error:
                self._fail(tier, error)
                self._unread_until[tier.tier] = time.monotonic() + READ_RETRY_S
                continue
            self._recover(tier)
            if checksum is None:
                continue
            faster = self.tiers[: self.tiers.index(tier)]
            wanting = [t for t in faster if t.wants(block_hash, into.nbytes, tenant, keep)]
            self.put(block_hash, into, checksum, wanting, tenant, keep)
            return FoundBlock(checksum, tier.tier)
        return None

    def look(self, shared: SharedDiskTier) -> None:
        """Lets a shared tier see what its neighbours hold; a failure is the tier's."""
        try:
            shared.look()
        except StoreUnavailable as error:
            self._fail(shared, error)
        else:
            self._recover(shared)

    def flush(self, tenant: str | None = None) -> tuple[int, int]:
        """Drops all blocks, or one tenant's, pinned ones too; returns how many and their bytes, a block in two tiers
        twice. Raises StoreUnavailable if a tier fails; earlier tiers are flushed by then."""
        num_blocks = num_bytes = 0
        for tier in self.tiers:
            for block_hash in tier.blocks.hashes(tenant):
                size = tier.blocks.size_of(block_hash)
                try:
                    tier.drop(block_hash)
                except StoreUnavailable as error:
                    self._fail(tier, error)
                    raise
                num_blocks += 1
                num_bytes += size
        return num_blocks, num_bytes

    def pin(self, pin: Pin) -> PinState:
        """Pins these blocks, held yet or not, in every tier whose pin budget has room for all of them.

        Replaces a pin of the same name. Raises InvalidRequest (field prefix) if no tier has room, StoreUnavailable
        if the pin cannot be saved; then nothing has changed.
        """
        before = self._pins.get(pin.name)
        self._unpin(pin.name)
        pinned = [tier for tier in self.tiers if self._pin(tier, pin)]
        try:
            if not pinned:
                raise self._no_room(pin)
            self._pins.put(pin)
        except (InvalidRequest, StoreUnavailable):
            self._unpin(pin.name)
            if before is not None:
                for tier in self.tiers:
                    self._pin(tier, before)
            raise
        return self._state(pin)

    def unpin(self, name: str) -> Pin:
        """Ends a pin; its blocks can be evicted from now on. Raises NotFound."""
        pin = self._pins.get(name)
        if pin is None:
            raise NotFound(f"there is no pin {name!r}", field="name", value=name)
        self._pins.remove(name)
        self._unpin(name)
        return pin

    def pins(self) -> list[PinState]:
        """All pins, oldest first."""
        return [self._state(pin) for pin in self._pins.all()]

    def close(self) -> None:
        """Closes all; idempotent."""
        for tier in self.tiers:
            tier.close()

    def _state(self, pin: Pin) -> PinState:
        num_held = sum(any(tier.holds(name) for tier in self.tiers) for name in set(pin.block_hashes))
        return PinState(pin, num_held, tuple(tier.tier for tier in self.tiers if pin.name in tier.blocks.pins.names))

    def _pin(self, tier: BlockTier, pin: Pin) -> bool:
        return tier.blocks.pin(pin.name, pin.block_hashes, pin.block_bytes + tier.overhead_bytes, pin.tenant)

    def _unpin(self, name: str) -> None:
        for tier in self.tiers:
            tier.blocks.unpin(name)

    def _apply_pins(self, tier: BlockTier) -> None:
        for pin in self._pins.all():
            if not self._pin(tier, pin):
                logger.warning("pin %s has no room in the %s tier any more", pin.name, tier.tier.name.lower())

    def _no_room(self, pin: Pin) -> InvalidRequest:
        room = ", ".join(
            f"{tier.tier.name.lower()} {tier.blocks.pins.used_bytes} of {tier.blocks.pins.budget_bytes} bytes pinned"
            for tier in self.tiers
        )
        num_bytes = len(set(pin.block_hashes)) * pin.block_bytes
        return InvalidRequest(
            f"the prefix takes {num_bytes} bytes, more than pins or the tenant's quota leave in any tier ({room})",
            field="prefix",
            limit=max((tier.blocks.pins.budget_bytes for tier in self.tiers), default=0),
        )

    def _readable(self, tier: BlockTier) -> bool:
        return time.monotonic() >= self._unread_until.get(tier.tier, 0.0)

    def _fail(self, tier: BlockTier, error: StoreUnavailable) -> None:
        if tier.tier not in self.failed:
            logger.error("the %s tier fails, the store continues without it: %s", tier.tier.name.lower(), error)
        self.failed[tier.tier] = error

    def _recover(self, tier: BlockTier) -> None:
        if self.failed.pop(tier.tier, None) is not None:
            logger.info("the %s tier works again", tier.tier.name.lower())
