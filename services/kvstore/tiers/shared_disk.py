"""A disk tier on a file system that several nodes mount: each writes to a folder of its own, and serves what all wrote.

    <folder>/store-0/…            a node's `DiskTier`; its lock is touched as long as the node lives
    <folder>/store-1/…            another node's: read here, never written

So no two processes write to one folder, and each node bounds what it has written; all together hold the sum of their
budgets. Where a node is gone, the others serve its blocks; it finds them again when it comes back. What one that has
been gone for FORGOTTEN_S has left is deleted. A block that a neighbour holds is not stored twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from services.kvstore.tiers.accounts import Quotas
from services.kvstore.tiers.disk import SUFFIX, DiskTier, Header, block_path, hash_of, read_block, read_header
from services.kvstore.tiers.order import PLAIN, Keep
from services.kvstore.tiers.tier import TierEvents
from shared.errors import ConfigError

FORGOTTEN_S = 24 * 3600.0
"""A node that has not touched its lock for this long is gone for good. Seconds, by the file system's clock."""
FRESH_NS = 3 * 10**9
"""A folder that changed so short ago may change again without another time of change. Nanoseconds."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,127}")


class SharedDiskTier(DiskTier):
    """See above. `look()` is to be called now and then: it finds what neighbours have stored and evicted.

    Between two looks a block that a neighbour evicted may seem to be held; reading it then finds that it is not.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        budget_bytes: int,
        block_bytes: int,
        quotas: Quotas | None = None,
        pin_share: float = 0.0,
    ) -> None:
        """`node`: its name, no other node's. Raises ConfigError as `DiskTier`, and (field name) for a name that is none
        of a folder."""
        super().__init__(own_folder(folder, node), budget_bytes, block_bytes, quotas, pin_share)
        self._neighbours = Neighbours(self._folder)
        self._announced: set[bytes] = set()  # what the index lists as here

    def start(self) -> None:
        """See `DiskTier`; neighbours' blocks are events too."""
        super().start()
        self.look()

    def look(self) -> None:
        """Reads which blocks the neighbours hold, and says that this node lives. Blocks on the file system; raises
        StoreUnavailable."""
        with self._disk_errors():
            with contextlib.suppress(OSError):  # read-only: it still serves
                os.utime(self._folder / "lock")
            self._neighbours.look()

    def holds(self, block_hash: bytes) -> bool:
        """See BlockTier."""
        return super().holds(block_hash) or block_hash in self._neighbours

    def wants(self, block_hash: bytes, num_bytes: int, tenant: str = "", keep: Keep = PLAIN) -> bool:
        """See BlockTier. A neighbour's block is held; that it was offered here, the neighbour does not learn."""
        if block_hash in self._neighbours and block_hash not in self.blocks:
            return False
        return super().wants(block_hash, num_bytes, tenant, keep)

    def put(self, block_hash: bytes, block: memoryview, checksum: int, tenant: str = "", keep: Keep = PLAIN) -> None:
        """See BlockTier."""
        if block_hash in self.blocks or block_hash not in self._neighbours:
            super().put(block_hash, block, checksum, tenant, keep)

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """See BlockTier. A neighbour's damaged block is counted and not read again; its file is the neighbour's."""
        if block_hash in self.blocks or block_hash not in self._neighbours:
            checksum = super().read(block_hash, into)
            if checksum is not None or block_hash not in self._neighbours:
                return checksum
        for path in self._neighbours.paths(block_hash):
            with self._disk_errors():
                checksum = read_block(path, block_hash, into)
                if checksum is not None:
                    self.counters.num_hits += 1
                    return checksum
                self.counters.num_bad += path.exists()
            self._neighbours.forget(path)
        self.counters.num_misses += 1
        return None

    def whose(self, block_hash: bytes) -> tuple[str, Keep]:
        """See BlockTier."""
        if block_hash in self.blocks:
            return super().whose(block_hash)
        for path in self._neighbours.paths(block_hash):
            with contextlib.suppress(OSError):
                header: Header | None = read_header(path, block_hash)
                if header is not None:
                    return header.tenant, header.keep
        return "", PLAIN

    def drain_events(self) -> TierEvents:
        """See BlockTier; a block that leaves one folder and is in another has not left."""
        own = super().drain_events()
        changed = dict.fromkeys([*own.sealed, *own.evicted, *self._neighbours.drain()])
        sealed = [name for name in changed if self.holds(name) and name not in self._announced]
        evicted = [name for name in changed if not self.holds(name) and name in self._announced]
        self._announced.update(sealed)
        self._announced.difference_update(evicted)
        return TierEvents(sealed, evicted)


class Neighbours:
    """Which blocks lie in the folders beside one's own. It writes nothing, but deletes those of a node that is gone."""

    def __init__(self, own: Path) -> None:
        self._own = own
        self._counts: Counter[bytes] = Counter()  # folders that hold a block
        self._seen: dict[Path, tuple[int, frozenset[bytes]]] = {}  # time of change and blocks of each ??/
        self._folders: list[Path] = []
        self._changed: dict[bytes, None] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether one of them holds it, as of the last look."""
        return block_hash in self._counts

    def paths(self, block_hash: bytes) -> list[Path]:
        """The block's files in the folders of all nodes, as of the last look."""
        paths = [block_path(folder, block_hash) for folder in self._folders]
        return [path for path in paths if block_hash in self._seen.get(path.parent, (0, frozenset[bytes]()))[1]]

    def drain(self) -> list[bytes]:
        """Blocks that came or went since the last call."""
        changed, self._changed = list(self._changed), {}
        return changed

    def look(self) -> None:
        """Lists the folders that have changed. Raises OSError."""
        now_ns = (self._own / "lock").stat().st_mtime_ns
        there: set[Path] = set()
        locks = [lock for lock in self._own.parent.glob("*/lock") if lock.parent != self._own]
        self._folders = [lock.parent for lock in locks]
        for lock in locks:
            with contextlib.suppress(FileNotFoundError):
                if lock.stat().st_mtime_ns < now_ns - FORGOTTEN_S * 1e9:
                    with contextlib.suppress(OSError):  # another one may have the right to
                        _clear(lock)
            for part in _parts(lock.parent):
                there.add(part)
                with contextlib.suppress(FileNotFoundError):
                    self._list(part, now_ns)
        for part in self._seen.keys() - there:
            self._keep(part, 0, frozenset())
            del self._seen[part]

    def forget(self, path: Path) -> None:
        """The block of this path is not there, or damaged."""
        block_hash = hash_of(path)
        changed_ns, found = self._seen[path.parent]
        if block_hash is not None:
            self._keep(path.parent, changed_ns, found - {block_hash})

    def _list(self, part: Path, now_ns: int) -> None:
        changed_ns = part.stat().st_mtime_ns
        if part in self._seen and self._seen[part][0] == changed_ns:
            return
        found = frozenset(name for path in part.glob(f"*{SUFFIX}") if (name := hash_of(path)) is not None)
        self._keep(part, changed_ns if changed_ns < now_ns - FRESH_NS else 0, found)

    def _keep(self, part: Path, changed_ns: int, found: frozenset[bytes]) -> None:
        before = self._seen[part][1] if part in self._seen else frozenset()
        self._seen[part] = changed_ns, found
        for block_hash in before - found:
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]
        self._counts.update(found - before)
        self._changed.update(dict.fromkeys(before ^ found))


def own_folder(folder: Path, node: str) -> Path:
    """A node's own in the shared one. Raises ConfigError (field name)."""
    if _NODE.fullmatch(node) is None:
        raise ConfigError(
            f"name: {node!r} names the node's folder in disk_folder, and must be letters, digits and ._@:- for that",
            field="name",
        )
    return folder / node


def _parts(folder: Path) -> Iterator[Path]:
    return (part for part in folder.glob("??") if part.is_dir())


def _clear(lock: Path) -> None:
    """Deletes the blocks of a node that is gone, unless it came back. The folder and its lock stay: who holds the lock
    must hold the one that all others see."""
    with lock.open("r+b") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        for part in _parts(lock.parent):
            for path in part.iterdir():
                path.unlink(missing_ok=True)
