"""The identity of a process of the fleet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WorkerRole(StrEnum):
    """What a worker, or another holder of blocks, does in the fleet. On the wire see `shared.rpc.convert`."""

    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"
    """Keeps blocks, computes nothing."""


Roles = frozenset[WorkerRole]
"""Roles of one worker: prefill, decode or both."""

PREFILL: Roles = frozenset((WorkerRole.PREFILL,))
DECODE: Roles = frozenset((WorkerRole.DECODE,))
BOTH: Roles = PREFILL | DECODE


def roles_text(roles: Roles) -> str:
    """`prefill`, `decode` or `prefill,decode`: as files, flags and people have them."""
    return ",".join(role for role in WorkerRole if role in roles)


def holder_role(roles: Roles) -> WorkerRole:
    """The one role under which the index and counts by role list a worker: one that decodes is a decode worker."""
    return WorkerRole.DECODE if WorkerRole.DECODE in roles else WorkerRole.PREFILL


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One engine process; (name, incarnation) never repeats."""

    name: str
    incarnation: int  # random, 1 .. 2**64 - 1
    role: WorkerRole
