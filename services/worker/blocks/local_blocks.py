"""The event loop's copy of what the pool holds. It follows the engine's events, so it may be a moment late."""

from __future__ import annotations

from collections.abc import Sequence


class LocalBlocks:
    """The hashes of the pool's findable blocks."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._hashes

    def on_pool(self, sealed: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """Applies a change of the pool's contents."""
        self._hashes.difference_update(evicted)
        self._hashes.update(sealed)
