"""Blocks in a folder, one file each, named by their hash; they outlive the process.

    <folder>/lock                  held while a process uses the folder
    <folder>/3f/3f9c…e1.kv         header (64 bytes), block
    <folder>/3f/3f9c…e1.tmp        being written

A file appears under its name whole or not at all: it is written under another one and renamed. Nothing is synced to
the disk: it is a cache, and a power cut that leaves a name without its bytes leaves a block that its checksum refuses.
Every read checks header, size and checksum. Times of modification keep the order of use over a restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.lru import BlockLru, check_budget
from services.kvstore.tiers.tier import TierCounters, TierEvents
from shared.errors import ConfigError, StoreUnavailable
from shared.kv.hashing import HASH_BYTES
from shared.rpc.block_holders import Tier

MAGIC = b"TANDEMKV"
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sIIQQ16s")
"""Magic, format version, zero, bytes of the block, checksum, hash; then blake2b of these, 16 bytes."""
HEADER_BYTES = HEADER.size + 16
SUFFIX, UNFINISHED_SUFFIX = ".kv", ".tmp"


class DiskTier:
    """`BlockTier` of blocks of any size. The budget counts the files' bytes, not what the file system adds."""

    tier = Tier.DISK

    def __init__(self, folder: Path, budget_bytes: int, block_bytes: int) -> None:
        """Raises ConfigError (field disk_bytes) when not even one block of `block_bytes` fits. No I/O yet."""
        check_budget("disk_bytes", budget_bytes, block_bytes + HEADER_BYTES)
        self.counters = TierCounters()
        self._folder = folder
        self._lru = BlockLru(budget_bytes)
        self._lock: BinaryIO | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of the files."""
        return self._lru.used_bytes

    @property
    def budget_bytes(self) -> int:
        """Most of them."""
        return self._lru.budget_bytes

    def start(self) -> None:
        """Takes the folder and finds what an earlier process kept; it is in the next events. What is over the budget
        goes, oldest first.

        Raises ConfigError (field disk_folder) when the folder cannot be used or another process does.
        """
        if self._lock is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / "lock").open("wb")
        except OSError as error:
            raise ConfigError(
                f"the disk tier's folder {self._folder} cannot be used: {error}", field="disk_folder"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"another process uses the disk tier's folder {self._folder}", field="disk_folder"
            ) from error
        self._lock = lock
        self._adopt()

    def close(self) -> None:
        """See BlockTier; the files stay."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def holds(self, block_hash: bytes) -> bool:
        """See BlockTier."""
        return block_hash in self._lru

    def wants(self, block_hash: bytes, num_bytes: int) -> bool:
        """See BlockTier."""
        wanted = self._lru.wants(block_hash, num_bytes + HEADER_BYTES)
        self.counters.num_refused += not wanted and block_hash not in self._lru
        return wanted

    def put(self, block_hash: bytes, block: memoryview, checksum: int) -> None:
        """See BlockTier."""
        if block_hash in self._lru:
            self._touch(block_hash)
            return
        if block_checksum(block) != checksum:
            raise ValueError(f"the block's checksum is not {checksum:016x}")
        num_bytes = HEADER_BYTES + block.nbytes
        with self._disk_errors():
            for victim in self._lru.victims(num_bytes):
                self._delete(victim)
                self.counters.num_evicted += 1
            self._write(block_hash, block, checksum)
        self._lru.add(block_hash, num_bytes)
        self.counters.num_stored += 1

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """See BlockTier."""
        if block_hash not in self._lru:
            self.counters.num_misses += 1
            return None
        with self._disk_errors():
            checksum = self._read(block_hash, into)
            if checksum is None:
                self.counters.num_bad += 1
                self._delete(block_hash)
                return None
        self._touch(block_hash)
        self.counters.num_hits += 1
        return checksum

    def drain_events(self) -> TierEvents:
        """See BlockTier."""
        return TierEvents(*self._lru.drain())

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / (name + SUFFIX)

    def _adopt(self) -> None:
        """Files of an earlier process, in the order of their use; unfinished ones go."""
        found = []
        with self._disk_errors():
            for path in self._folder.glob("??/*"):
                if path.suffix == UNFINISHED_SUFFIX:
                    path.unlink()
                elif (block_hash := _hash_of(path)) is not None:
                    stat = path.stat()
                    found.append((stat.st_mtime_ns, stat.st_size, block_hash))
            room = self._lru.budget_bytes
            kept = []
            for _, size, block_hash in sorted(found, reverse=True):
                room -= size
                if room >= 0 and size > HEADER_BYTES:
                    kept.append((block_hash, size))
                else:
                    self._path(block_hash).unlink()
        for block_hash, size in reversed(kept):
            self._lru.add(block_hash, size)

    def _write(self, block_hash: bytes, block: memoryview, checksum: int) -> None:
        path = self._path(block_hash)
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        path.parent.mkdir(exist_ok=True)
        try:
            with unfinished.open("wb", buffering=0) as file:
                _write_all(file, memoryview(_header(block_hash, block.nbytes, checksum)))
                _write_all(file, block.cast("B"))
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _read(self, block_hash: bytes, into: memoryview) -> int | None:
        """The checksum, or None when the file is not what it should be, or gone.

        Raises ValueError when the file is whole and `into` has another size than its block.
        """
        try:
            with self._path(block_hash).open("rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                size = file.readinto(into.cast("B"))
                rest = file.read(1)
        except FileNotFoundError:
            return None
        if (stored := _stored_bytes(header, block_hash)) not in (None, into.nbytes):
            raise ValueError(f"the block has {stored} bytes, not {into.nbytes}")
        checksum = block_checksum(into)
        if size != into.nbytes or rest or header != _header(block_hash, into.nbytes, checksum):
            return None
        return checksum

    def _touch(self, block_hash: bytes) -> None:
        self._lru.use(block_hash)
        with contextlib.suppress(OSError):  # a read-only disk still serves; only the order of use is lost
            os.utime(self._path(block_hash))

    def _delete(self, block_hash: bytes) -> None:
        self._path(block_hash).unlink(missing_ok=True)
        self._lru.drop(block_hash)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        if self._lock is None:
            raise StoreUnavailable("the disk tier is not started", tier="disk")
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"the disk tier in {self._folder}: {error}", tier="disk") from error


def _header(block_hash: bytes, num_bytes: int, checksum: int) -> bytes:
    fields = HEADER.pack(MAGIC, FORMAT_VERSION, 0, num_bytes, checksum, block_hash)
    return fields + blake2b(fields, digest_size=16).digest()


def _stored_bytes(header: bytes, block_hash: bytes) -> int | None:
    """The block's size by its header; None when that is no header of this block."""
    if len(header) != HEADER_BYTES:
        return None
    *_, num_bytes, checksum, _ = HEADER.unpack_from(header)
    return int(num_bytes) if header == _header(block_hash, num_bytes, checksum) else None


def _write_all(file: BinaryIO, data: memoryview) -> None:
    """A raw file may take less than it is given."""
    while data:
        data = data[file.write(data) :]


def _hash_of(path: Path) -> bytes | None:
    """The hash that a file is named by; None for a file that is not ours."""
    try:
        block_hash = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return block_hash if path.suffix == SUFFIX and len(block_hash) == HASH_BYTES else None
