"""Who a process of the fleet is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WorkerRole(StrEnum):
    """What a worker, or another holder of blocks, does in the fleet. On the wire see `shared.rpc.convert`."""

    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"
    """Keeps blocks, computes nothing."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One engine process; (name, incarnation) never repeats."""

    name: str
    incarnation: int  # random, 1 .. 2**64 - 1
    role: WorkerRole
