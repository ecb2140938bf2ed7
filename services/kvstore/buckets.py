"""Which Redis key a block has, and which server that key is on. No redis import.

One server: all blocks are one bucket, the key is `b:` + hash, and one MGET reads a whole prompt.

A cluster hashes keys to 16,384 slots, and one command can read several keys only if they share a slot. So blocks are
divided into 128 buckets by the first byte of their hash; a key is `{tag}` + hash, with one two-letter tag a bucket. A
bucket's keys share a slot. The buckets' slots are spread evenly, so every node has its share of buckets. Block hashes
are uniform, so the blocks of a prompt, also of a popular system prompt, spread evenly over all nodes.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_letters, digits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.kvstore.resp.command import Command
from shared.kv.hashing import HASH_BYTES

NUM_SLOTS = 16_384
NUM_CLUSTER_BUCKETS = 128


def slot_of(tag: bytes) -> int:
    """The cluster slot of keys with this hash tag: CRC16 (XMODEM), as the Redis Cluster specification defines it."""
    return crc_hqx(tag, 0) % NUM_SLOTS


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a call's blocks: those of one bucket."""

    bucket: int
    hashes: bytes


class Buckets:
    """The keys of one layout: `Buckets.single()` or `Buckets.cluster()`."""

    def __init__(self, prefixes: Sequence[bytes], slots: Sequence[int]) -> None:
        """All prefixes have the same length."""
        self.prefixes = tuple(prefixes)
        self.slots = tuple(slots)
        self._prefix_len = len(prefixes[0])
        key_len = self._prefix_len + HASH_BYTES
        self._head = f"${key_len}\r\n".encode()
        rows = [self._head + prefix + bytes(HASH_BYTES) + b"\r\n" for prefix in prefixes]
        self._rows = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)  # [num_buckets, row bytes]

    @classmethod
    def single(cls) -> Buckets:
        """The key layout for a single server."""
        return cls([b"b:"], [0])

    @classmethod
    def cluster(cls) -> Buckets:
        """Tags whose slots are nearest to the middles of 128 equal ranges."""
        tags = ["".join(letters).encode() for letters in product(ascii_letters + digits, repeat=2)]
        slots = np.array([slot_of(tag) for tag in tags])
        width = NUM_SLOTS // NUM_CLUSTER_BUCKETS
        nearest = [int(np.abs(slots - (i * width + width // 2)).argmin()) for i in range(NUM_CLUSTER_BUCKETS)]
        return cls([b"{" + tags[i] + b"}" for i in nearest], [int(slots[i]) for i in nearest])

    def hash_of(self, key: bytes) -> bytes | None:
        """The block hash in a key; None if the key does not belong to a block."""
        is_block = len(key) == self._prefix_len + HASH_BYTES and key[: self._prefix_len] in self.prefixes
        return key[self._prefix_len :] if is_block else None

    def parts(self, hashes: bytes, max_hashes: int) -> Iterator[Part]:
        """The blocks by bucket, at most `max_hashes` (of 16 bytes) in each part, in their order within a bucket."""
        rows, order, bounds = self._sorted(hashes)
        ordered = rows.tobytes() if order is None else rows[order].tobytes()
        for bucket, first, end in bounds:
            for start in range(first, end, max_hashes):
                stop = min(end, start + max_hashes)
                yield Part(bucket, ordered[start * HASH_BYTES : stop * HASH_BYTES])

    def read(self, hashes: bytes, version_key: bytes) -> Read:
        """The commands that read the index's version and every block's holders."""
        rows, order, bounds = self._sorted(hashes)
        numbers = 0 if order is None else rows[order, 0] % len(self.prefixes)
        packed = np.empty((len(rows), self._rows.shape[1]), np.uint8)
        packed[:] = self._rows[numbers]
        start = len(self._head) + self._prefix_len
        packed[:, start : start + HASH_BYTES] = rows if order is None else rows[order]
        size, keys = packed.shape[1], packed.tobytes()
        version = b"$%d\r\n%b\r\n" % (len(version_key), version_key)
        if order is None:
            mget = b"*%d\r\n$4\r\nMGET\r\n%b%b" % (len(rows) + 2, version, keys)
            return Read((Command(mget),), None)
        commands = [Command(b"*2\r\n$3\r\nGET\r\n" + version, slot_of(_tag(version_key)))]
        for bucket, first, end in bounds:
            mget = b"*%d\r\n$4\r\nMGET\r\n%b" % (end - first + 1, keys[first * size : end * size])
            commands.append(Command(mget, self.slots[bucket]))
        return Read(tuple(commands), order)

    def _sorted(self, hashes: bytes) -> tuple[NDArray[np.uint8], NDArray[np.intp] | None, list[tuple[int, int, int]]]:
        """[num_hashes, 16], their order by bucket (None: one bucket), and (bucket, first, end) in that order."""
        rows = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
        if len(self.prefixes) == 1:
            return rows, None, [(0, 0, len(rows))] if len(rows) else []
        numbers = rows[:, 0] % len(self.prefixes)
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=len(self.prefixes))).tolist()
        firsts = [0, *ends[:-1]]
        return (
            rows,
            order,
            [(i, first, end) for i, (first, end) in enumerate(zip(firsts, ends, strict=True)) if end > first],
        )


@dataclass(frozen=True, slots=True)
class Read:
    """Commands of one match."""

    commands: tuple[Command, ...]
    order: NDArray[np.intp] | None

    def collect(self, replies: list[Any]) -> tuple[bytes | None, list[bytes | None]]:
        """The version, and each block's holders in the order of the chain."""
        if self.order is None:
            version, *values = replies[0]
            return version, values
        found = [value for reply in replies[1:] for value in reply]
        values = [None] * len(found)
        for position, value in zip(self.order.tolist(), found, strict=True):
            values[position] = value
        return replies[0], values


def _tag(key: bytes) -> bytes:
    return key[key.index(b"{") + 1 : key.index(b"}")]
