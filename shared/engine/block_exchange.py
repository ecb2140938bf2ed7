"""Blocks on their way between this worker's pool and stores or peers: held while sent, cached when they arrive.

Runs on the engine's thread. It does not deal with sequences: arrived blocks are cached prefix, found like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from shared.kv.pool import BlockPool, OutgoingBlock, OutOfBlocks


@dataclass(slots=True)
class _Fetch:
    """Blocks that wait for their bytes, and what is kept from eviction meanwhile."""

    hashes: tuple[bytes, ...]
    local: list[int]
    open: dict[int, int] = field(default_factory=dict)  # index in `hashes` -> block id


class BlockExchange:
    """Keeps the references of blocks that are being sent or received."""

    def __init__(self, pool: BlockPool, checksums: Callable[[list[int]], list[int]]) -> None:
        """`checksums(block_ids)` are those of the blocks as they are now."""
        self._pool = pool
        self._checksums = checksums
        self._fetches: dict[str, _Fetch] = {}
        self.num_bad_blocks = 0
        """Arrived damaged: given back, to be computed."""

    def hold(self, key: str, hashes: Sequence[bytes]) -> tuple[OutgoingBlock, ...]:
        """The blocks among these that are still here, each with a reference for the sender; `index` is the place in
        `hashes`."""
        found = [(index, ids[0]) for index, name in enumerate(hashes) if (ids := self._pool.match([name]))]
        self._pool.acquire([block_id for _, block_id in found])
        checksum_of = self._pool.checksum_of
        return tuple(OutgoingBlock(key, index, block_id, checksum_of(block_id)) for index, block_id in found)

    def prepare(
        self, key: str, hashes: tuple[bytes, ...], num_spare: int, times: int = 1
    ) -> tuple[tuple[int, int], ...]:
        """Takes blocks for those of a chain that are not here: (index, block id) each, to be written to until `end`.

        Takes nothing unless the pool has `times` times as many free blocks, and `num_spare` more.
        """
        assert key not in self._fetches
        local = self._pool.match(hashes)
        missing = [index for index in range(len(local), len(hashes)) if not self._pool.match([hashes[index]])]
        self._pool.acquire(local)
        try:
            needed = times * len(missing) + num_spare
            if needed > self._pool.num_free:
                raise OutOfBlocks(needed, self._pool.num_free)
            fresh = self._pool.allocate(len(missing))
        except OutOfBlocks:
            self._pool.release(local)
            return ()
        fetch = _Fetch(hashes, local, dict(zip(missing, fresh, strict=True)))
        self._fetches[key] = fetch
        return tuple(fetch.open.items())

    def adopt(self, key: str, checksums: Mapping[int, int], num_damaged: int = 0) -> tuple[int, ...]:
        """These blocks have arrived, by index, with the checksums that they should have: the sound ones are cached
        from now on. `num_damaged`: others that were found damaged. Returns the indexes of those that were not in the
        pool yet."""
        self.num_bad_blocks += num_damaged
        fetch = self._fetches[key]
        arrived = {index: fetch.open[index] for index in checksums if index in fetch.open}
        found = self._checksums(list(arrived.values()))
        new: list[int] = []
        for (index, block_id), checksum in zip(arrived.items(), found, strict=True):
            if checksum != checksums[index]:
                self.num_bad_blocks += 1
                continue
            del fetch.open[index]
            if not self._pool.match([fetch.hashes[index]]):
                new.append(index)
            self._pool.seal(block_id, fetch.hashes[index])
            self._pool.set_checksum(block_id, checksum)
            self._pool.release([block_id])
        return tuple(new)

    def end(self, key: str, lost: Set[int] = frozenset()) -> None:
        """Gives back what did not arrive, but for the block ids `lost`, to which a silent sender may still write: those
        a later `end` gives back. An unknown key is one for which nothing was taken."""
        fetch = self._fetches.pop(key, None)
        if fetch is None:
            return
        self._pool.release(fetch.local)
        self._pool.release([block_id for block_id in fetch.open.values() if block_id not in lost])
        kept = {index: block_id for index, block_id in fetch.open.items() if block_id in lost}
        if kept:
            self._fetches[key] = _Fetch(fetch.hashes, [], kept)
