"""Commands ready to send, and Lua scripts that are called by their hash."""

from __future__ import annotations

import hashlib
from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import hiredis

Part = bytes | str | int
NUM_SLOTS = 16_384


def slot_of(tag: bytes) -> int:
    """The cluster slot of keys with this hash tag: CRC16 (XMODEM), as the Redis Cluster specification defines it."""
    return crc_hqx(tag, 0) % NUM_SLOTS


@dataclass(frozen=True)
class LuaScript:
    """A script and its name for EVALSHA."""

    source: str

    @cached_property
    def sha(self) -> str:
        """SHA-1 of the source, in hex: how Redis names scripts; not used for security."""
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Command:
    """One command. On a cluster it goes to the node that serves `slot`."""

    packed: bytes
    slot: int = 0
    source: bytes | None = None
    """The same call with the script's source, for a server that has not cached the script."""

    @classmethod
    def of(cls, *parts: Part, slot: int = 0) -> Command:
        """A command from its parts, encoded."""
        return cls(pack(parts), slot)

    @classmethod
    def script(cls, script: LuaScript, keys: Sequence[bytes], arguments: Sequence[Part], slot: int = 0) -> Command:
        """One run of a script. It may run twice if a server has not cached it yet, so it must be idempotent."""
        rest = (len(keys), *keys, *arguments)
        return cls(pack(("EVALSHA", script.sha, *rest)), slot, pack(("EVAL", script.source, *rest)))


def pack(parts: Sequence[Part]) -> bytes:
    """The command in Redis's wire format."""
    packed: bytes = hiredis.pack_command(tuple(parts))  # type: ignore[arg-type,no-untyped-call,unused-ignore]
    return packed
