"""Blocks in a folder, one file each, named after their hash; they outlive the process.

    <folder>/lock                  held while a process uses the folder
    <folder>/3f/3f9c…e1.kv         header (192 bytes), block
    <folder>/3f/3f9c…e1.tmp        being written
    <folder>/pins.json             see pins.py

A file appears under its final name complete or not at all: it is written under another name and renamed. Nothing is
synced to the disk, because it is a cache: if a power cut leaves a file without its bytes, its checksum does not match.
Every read checks header, size and checksum. Modification times keep the order of use over a restart. The header names
the tenant, so that quotas hold over a restart too: at the start the header of every file is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from services.kvstore.tiers.accounts import Quotas
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.lru import BlockLru, check_budget, check_quotas
from services.kvstore.tiers.order import PLAIN, Keep
from services.kvstore.tiers.tier import TierCounters, TierEvents
from shared.durable_files import write_all
from shared.errors import ConfigError, StoreUnavailable
from shared.kv.hashing import HASH_BYTES
from shared.kv_index.holders import Tier

MAGIC = b"TANDEMKV"
FORMAT_VERSION = 2
MAX_TENANT_BYTES = 128
HEADER = struct.Struct(f"<8sIIQQ16s{MAX_TENANT_BYTES}s")
"""Magic, format version, twice the seconds for which it is retained (1 more: low priority), bytes of the block,
checksum, hash, tenant; then blake2b of these, 16 bytes."""
HEADER_BYTES = HEADER.size + 16
_MOST_KEPT = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Header:
    """The header's fields, without the block's hash."""

    num_bytes: int
    checksum: int
    tenant: str
    keep: Keep = PLAIN  # with which it was stored

    def pack(self, block_hash: bytes) -> bytes:
        """`HEADER_BYTES` bytes."""
        kept = (int(self.keep.retain_s) << 1 | self.keep.is_low) & _MOST_KEPT
        fields = HEADER.pack(
            MAGIC, FORMAT_VERSION, kept, self.num_bytes, self.checksum, block_hash, self.tenant.encode()
        )
        return fields + blake2b(fields, digest_size=16).digest()

    @classmethod
    def parse(cls, data: bytes, block_hash: bytes) -> Header | None:
        """None when `data` is no valid header of this block."""
        if len(data) != HEADER_BYTES or blake2b(data[: HEADER.size], digest_size=16).digest() != data[HEADER.size :]:
            return None
        magic, version, kept, num_bytes, checksum, named, tenant = HEADER.unpack_from(data)
        if (magic, version, named) != (MAGIC, FORMAT_VERSION, block_hash):
            return None
        return cls(num_bytes, checksum, tenant.rstrip(b"\0").decode(), Keep(float(kept >> 1), bool(kept & 1)))


SUFFIX, UNFINISHED_SUFFIX = ".kv", ".tmp"


class DiskTier:
    """`BlockTier` of blocks of any size. The budget counts the files' bytes, not the file system's overhead."""

    tier = Tier.DISK
    overhead_bytes = HEADER_BYTES

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        block_bytes: int,
        quotas: Quotas | None = None,
        pin_share: float = 0.0,
    ) -> None:
        """At most `pin_share` of the budget may be pinned. Raises ConfigError (field disk_bytes, or the tenant's quota)
        when not even one block of `block_bytes` fits. No I/O yet."""
        limits = quotas or Quotas()
        self.counters = TierCounters()
        self._budget_bytes = budget_bytes
        self._quotas = limits
        self.check_block(block_bytes)
        self._folder = folder
        self.blocks = BlockLru(budget_bytes, limits, int(pin_share * budget_bytes))
        self._lock: BinaryIO | None = None

    def check_block(self, block_bytes: int) -> None:
        """Raises ConfigError naming the setting into which not even one such block fits."""
        check_budget("disk_bytes", self._budget_bytes, block_bytes + HEADER_BYTES)
        check_quotas("disk_bytes", self._quotas, block_bytes + HEADER_BYTES)

    @property
    def folder(self) -> Path:
        """Folder of the tier's blocks and of its node's pins."""
        return self._folder

    def start(self) -> None:
        """Locks the folder and adopts an earlier process's blocks, reported by the next events. Deletes blocks over
        the budget or their tenant's quota, oldest first and pinned ones last, and files that are not whole blocks.

        Raises ConfigError (field disk_folder) when the folder cannot be used or another process does.
        """
        if self._lock is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._folder / "lock")
        except BlockingIOError as error:
            raise ConfigError(
                f"another process uses the disk tier's folder {self._folder}", field="disk_folder"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the disk tier's folder {self._folder} cannot be used: {error}", field="disk_folder"
            ) from error
        self._adopt()

    def close(self) -> None:
        """See BlockTier; the files stay."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def holds(self, block_hash: bytes) -> bool:
        """See BlockTier."""
        return block_hash in self.blocks

    def wants(self, block_hash: bytes, num_bytes: int, tenant: str = "", keep: Keep = PLAIN) -> bool:
        """See BlockTier."""
        wanted = self.blocks.wants(block_hash, num_bytes + HEADER_BYTES, tenant, keep)
        self.counters.num_refused += not wanted and block_hash not in self.blocks
        return wanted

    def put(self, block_hash: bytes, block: memoryview, checksum: int, tenant: str = "", keep: Keep = PLAIN) -> None:
        """See BlockTier."""
        if block_hash in self.blocks:
            self._touch(block_hash, keep)
            return
        if block_checksum(block) != checksum:
            raise ValueError(f"the block's checksum is not {checksum:016x}")
        num_bytes = HEADER_BYTES + block.nbytes
        if not self.blocks.can_fit(num_bytes, tenant):
            self.counters.num_refused += 1
            return
        with self._disk_errors():
            for victim in self.blocks.victims(num_bytes, tenant):
                self._path(victim).unlink(missing_ok=True)
                self.blocks.evict(victim)
                self.counters.num_evicted += 1
            self._write(block_hash, block, Header(block.nbytes, checksum, tenant, keep))
        self.blocks.add(block_hash, num_bytes, tenant, keep)
        self.counters.num_stored += 1

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        """See BlockTier."""
        if block_hash not in self.blocks:
            self.counters.num_misses += 1
            return None
        with self._disk_errors():
            checksum = read_block(self._path(block_hash), block_hash, into)
            if checksum is None:
                self.counters.num_bad += 1
                self.blocks.drop(block_hash)
                with contextlib.suppress(OSError):  # a read-only disk keeps the file; it is not served
                    self._path(block_hash).unlink()
                return None
        self.blocks.hit(block_hash)
        self._touch(block_hash)
        self.counters.num_hits += 1
        return checksum

    def whose(self, block_hash: bytes) -> tuple[str, Keep]:
        """See BlockTier."""
        return self.blocks.tenant_of(block_hash), self.blocks.keep_of(block_hash)

    def drop(self, block_hash: bytes) -> None:
        """See BlockTier."""
        if block_hash in self.blocks:
            with self._disk_errors():
                self._path(block_hash).unlink(missing_ok=True)
            self.blocks.drop(block_hash)

    def drain_events(self) -> TierEvents:
        """See BlockTier."""
        return TierEvents(*self.blocks.drain())

    def _path(self, block_hash: bytes) -> Path:
        return block_path(self._folder, block_hash)

    def _adopt(self) -> None:
        """Adopts an earlier process's files in the order of their use; deletes unfinished and damaged ones."""
        found = []
        with self._disk_errors():
            for path in self._folder.glob("??/*"):
                if path.suffix == UNFINISHED_SUFFIX:
                    path.unlink()
                elif (block_hash := hash_of(path)) is not None:
                    stat, header = path.stat(), read_header(path, block_hash)
                    if header is None or stat.st_size != HEADER_BYTES + header.num_bytes:
                        self.counters.num_bad += 1
                        path.unlink()
                    else:
                        pinned = block_hash in self.blocks.pins
                        found.append((pinned, stat.st_mtime_ns, block_hash, stat.st_size, header))
            room, used = self.blocks.budget_bytes, Counter[str]()
            kept = []
            for _, used_at, block_hash, size, header in sorted(found, key=lambda item: item[:3], reverse=True):
                tenant = header.tenant
                quota = self._quotas.of(tenant)
                if size <= room and (not quota or used[tenant] + size <= quota):
                    kept.append((used_at, block_hash, size, header))
                    room -= size
                    used[tenant] += size
                else:
                    self._path(block_hash).unlink()
        for used_at, block_hash, size, header in reversed(kept):
            self.blocks.add(block_hash, size, header.tenant, header.keep, used_at / 1e9)

    def _write(self, block_hash: bytes, block: memoryview, header: Header) -> None:
        path = self._path(block_hash)
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        path.parent.mkdir(exist_ok=True)
        try:
            with unfinished.open("wb", buffering=0) as file:
                write_all(file, memoryview(header.pack(block_hash)))
                write_all(file, block.cast("B"))
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _touch(self, block_hash: bytes, keep: Keep | None = None) -> None:
        self.blocks.use(block_hash, keep)
        with contextlib.suppress(OSError):  # a read-only disk still serves; only the order of use is lost
            os.utime(self._path(block_hash))

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        if self._lock is None:
            raise StoreUnavailable("the disk tier is not started", tier="disk")
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"the disk tier in {self._folder}: {error}", tier="disk") from error


def block_path(folder: Path, block_hash: bytes) -> Path:
    """Where a block lies in a tier's folder."""
    name = block_hash.hex()
    return folder / name[:2] / (name + SUFFIX)


def _locked(path: Path) -> BinaryIO:
    """Locks a file, which is made if it is missing, until it is closed. Raises BlockingIOError where another process
    has it, OSError."""
    if not path.exists():
        path.touch()
    # Not for writing: an open writer would keep the disk from being remounted read-only.
    for mode in ("rb", "r+b"):
        lock: BinaryIO = path.open(mode)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if error.errno != errno.EBADF or mode != "rb":
                raise
        else:
            return lock
    raise AssertionError  # not reached


def read_header(path: Path, block_hash: bytes) -> Header | None:
    """None where the file does not begin with a header of this block. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return Header.parse(file.read(HEADER_BYTES), block_hash)


def read_block(path: Path, block_hash: bytes, into: memoryview) -> int | None:
    """Copies the block of a file to `into`; returns its checksum, or None when the file is damaged or gone.

    Raises ValueError when the file is whole and `into` has another size than its block, OSError.
    """
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(HEADER_BYTES)
            size = file.readinto(into.cast("B"))
            rest = file.read(1)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # another host has deleted it
            return None
        raise
    stored = Header.parse(header, block_hash)
    if stored is not None and stored.num_bytes != into.nbytes:
        raise ValueError(f"the block has {stored.num_bytes} bytes, not {into.nbytes}")
    checksum = block_checksum(into)
    if stored is None or stored.checksum != checksum or size != into.nbytes or rest:
        return None
    return checksum


def hash_of(path: Path) -> bytes | None:
    """The hash in a file's name; None for a file that is no block."""
    try:
        block_hash = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return block_hash if path.suffix == SUFFIX and len(block_hash) == HASH_BYTES else None
