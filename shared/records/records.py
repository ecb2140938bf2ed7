"""The interface to records, and the one in memory.

A record belongs to a tenant and has a key that is unique there. It is forgotten `ttl_s` after its last use. Two bounds
hold, of a tenant's bytes and of all: what passes one takes the place of those that were used longest ago, of that
tenant or of all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import InvalidRequest

MAX_RECORD_BYTES = 3 << 20
"""Longest value, bytes: a gRPC message holds it."""
MAX_KEY_BYTES = 256
MAX_KEYS = 512
"""Most keys of one call."""
STAMP_BYTES = 16


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read."""

    key: str
    stamp: bytes  # of the write that made it so
    value: bytes


@dataclass(frozen=True, slots=True)
class Unless:
    """Condition under which a record is not written. At most one of both is set."""

    changed_from: bytes = b""
    """The record is not the one with this stamp any more."""
    exists: bool = False
    """A record of this key exists."""


ALWAYS = Unless()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of values and keys."""

    total_bytes: int
    tenant_bytes: int


class Records(Protocol):
    """Safe for concurrent calls of one event loop. All raise StoreUnavailable in bounded time, and InvalidRequest for
    a key or value that is too long."""

    async def get(self, tenant: str, keys: Sequence[str], ttl_s: float = 0.0) -> list[Record | None]:
        """The records of these keys, None for one that is not there. With `ttl_s` each is kept for at least that long
        from now on."""
        ...

    async def put(self, tenant: str, key: str, value: bytes, ttl_s: float, unless: Unless = ALWAYS) -> bytes | None:
        """Writes a record; its stamp, or None where the condition kept it from being written."""
        ...

    async def delete(self, tenant: str, keys: Sequence[str]) -> int:
        """Removes records; returns how many there were."""
        ...


def check_record(tenant: str, keys: Sequence[str], value: bytes = b"", bounds: Bounds | None = None) -> None:
    """Raises InvalidRequest naming `tenant`, `key`, `keys` or `value`, with the limit."""
    if not tenant or len(tenant.encode()) > MAX_KEY_BYTES or "\0" in tenant:
        raise InvalidRequest(
            f"tenant must have 1 to {MAX_KEY_BYTES} bytes, none of them 0", field="tenant", limit=MAX_KEY_BYTES
        )
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(f"at most {MAX_KEYS} keys a call, got {len(keys)}", field="keys", limit=MAX_KEYS)
    for key in keys:
        if not key or len(key.encode()) > MAX_KEY_BYTES or "\0" in key:
            raise InvalidRequest(
                f"key must have 1 to {MAX_KEY_BYTES} bytes, none of them 0", field="key", limit=MAX_KEY_BYTES
            )
    most = MAX_RECORD_BYTES if bounds is None else min(MAX_RECORD_BYTES, bounds.tenant_bytes, bounds.total_bytes)
    if len(value) > most:
        raise InvalidRequest(f"the record has {len(value)} bytes, at most {most} are kept", field="value", limit=most)


@dataclass(slots=True)
class _Kept:
    record: Record
    expires_at: float
    num_bytes: int


class MemoryRecords:
    """`Records` of one process."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._bounds = bounds
        self._clock = clock
        self._kept: dict[tuple[str, str], _Kept] = {}  # used longest ago first
        self._used: dict[str, int] = {}
        self._total = 0

    async def get(self, tenant: str, keys: Sequence[str], ttl_s: float = 0.0) -> list[Record | None]:
        """See `Records`."""
        check_record(tenant, keys)
        return [self._get((tenant, key), ttl_s) for key in keys]

    async def put(self, tenant: str, key: str, value: bytes, ttl_s: float, unless: Unless = ALWAYS) -> bytes | None:
        """See `Records`."""
        check_record(tenant, (key,), value, self._bounds)
        place = (tenant, key)
        found = self._get(place, 0.0)
        if (found is not None and unless.exists) or (
            unless.changed_from and (found is None or found.stamp != unless.changed_from)
        ):
            return None
        self._drop(place)
        num_bytes = len(value) + STAMP_BYTES + len(key.encode())
        self._make_room(tenant, num_bytes)
        stamp = secrets.token_bytes(STAMP_BYTES)
        self._kept[place] = _Kept(Record(key, stamp, value), self._clock() + ttl_s, num_bytes)
        self._used[tenant] = self._used.get(tenant, 0) + num_bytes
        self._total += num_bytes
        return stamp

    async def delete(self, tenant: str, keys: Sequence[str]) -> int:
        """See `Records`."""
        check_record(tenant, keys)
        return sum(self._get((tenant, key), 0.0) is not None and self._drop((tenant, key)) for key in keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is kept, with ended records whose place was not taken again yet."""
        return self._total

    def _get(self, place: tuple[str, str], ttl_s: float) -> Record | None:
        kept = self._kept.get(place)
        if kept is None:
            return None
        now = self._clock()
        if kept.expires_at <= now:
            self._drop(place)
            return None
        if ttl_s:
            kept.expires_at = max(kept.expires_at, now + ttl_s)
            self._kept[place] = self._kept.pop(place)
        return kept.record

    def _drop(self, place: tuple[str, str]) -> bool:
        kept = self._kept.pop(place, None)
        if kept is None:
            return False
        self._total -= kept.num_bytes
        self._used[place[0]] -= kept.num_bytes
        if not self._used[place[0]]:
            del self._used[place[0]]
        return True

    def _purge(self) -> None:
        now = self._clock()
        for place in [place for place, kept in self._kept.items() if kept.expires_at <= now]:
            self._drop(place)

    def _make_room(self, tenant: str, num_bytes: int) -> None:
        in_tenant, in_all = self._bounds.tenant_bytes - num_bytes, self._bounds.total_bytes - num_bytes
        if self._used.get(tenant, 0) <= in_tenant and self._total <= in_all:
            return
        self._purge()
        while self._used.get(tenant, 0) > in_tenant:
            oldest = next((place for place in self._kept if place[0] == tenant), None)
            if oldest is None:
                break
            self._drop(oldest)
        while self._total > in_all and self._kept:
            self._drop(next(iter(self._kept)))
