"""Host memory over disk: what is offered to both, and read from the faster one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.tiers.tier import BlockTier
from shared.errors import StoreUnavailable
from shared.rpc.block_holders import Tier

logger = logging.getLogger(__name__)

READ_RETRY_S = 5.0
"""A tier that could not be read is taken to hold nothing for so long."""


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that was read, and is what its checksum says."""

    checksum: int
    tier: Tier


class TierStack:
    """The tiers of one node, fastest first. Each decides for itself what it takes and what goes.

    Not thread-safe, and may block on a disk, as the tiers. A tier that fails does not take the others with it: that is
    told to the log once, until a call on it works again.
    """

    def __init__(self, tiers: Sequence[BlockTier]) -> None:
        """Owns them."""
        self.tiers = list(tiers)
        self.failed: dict[Tier, StoreUnavailable] = {}
        """Tiers whose last call failed."""
        self._unread_until: dict[Tier, float] = {}

    def wanting(self, block_hash: bytes, num_bytes: int) -> tuple[BlockTier, ...]:
        """The tiers that would take a block; none where one of them holds it. All note that it was offered."""
        wanting = tuple(tier for tier in self.tiers if tier.wants(block_hash, num_bytes))
        return () if self.holds(block_hash) else wanting

    def holds(self, block_hash: bytes) -> bool:
        """Whether a tier that can be read has it."""
        return any(tier.holds(block_hash) for tier in self.tiers if self._readable(tier))

    def put(self, block_hash: bytes, block: memoryview, checksum: int, tiers: Sequence[BlockTier]) -> None:
        """Keeps a block in these tiers. Raises ValueError where the checksum is not its own."""
        for tier in tiers:
            try:
                tier.put(block_hash, block, checksum)
            except StoreUnavailable as error:
                self._fail(tier, error)
            else:
                self._recover(tier)

    def read(self, block_hash: bytes, into: memoryview) -> FoundBlock | None:
        """From the fastest tier that has it undamaged. What was read from a slower one comes into a faster one too,
        where that wants it."""
        for tier in self.tiers:
            if not tier.holds(block_hash) or not self._readable(tier):
                continue
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
            self.put(block_hash, into, checksum, [t for t in faster if t.wants(block_hash, into.nbytes)])
            return FoundBlock(checksum, tier.tier)
        return None

    def close(self) -> None:
        """Closes all; twice is fine."""
        for tier in self.tiers:
            tier.close()

    def _readable(self, tier: BlockTier) -> bool:
        return time.monotonic() >= self._unread_until.get(tier.tier, 0.0)

    def _fail(self, tier: BlockTier, error: StoreUnavailable) -> None:
        if tier.tier not in self.failed:
            logger.error("the %s tier fails, the store goes on without it: %s", tier.tier.name.lower(), error)
        self.failed[tier.tier] = error

    def _recover(self, tier: BlockTier) -> None:
        if self.failed.pop(tier.tier, None) is not None:
            logger.info("the %s tier works again", tier.tier.name.lower())
