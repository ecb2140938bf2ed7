"""Workers and hashes for the tests of this folder."""

from __future__ import annotations

from hashlib import blake2b

from shared.identity import WorkerIdentity, WorkerRole
from shared.kv_index.holders import Holder, Tier

"""By then a busy machine has done whatever a test waits for."""


def worker(name: str = "prefill-0", incarnation: int = 1, role: WorkerRole = WorkerRole.PREFILL) -> WorkerIdentity:
    return WorkerIdentity(name, incarnation, role)


def holder(identity: WorkerIdentity, tier: Tier = Tier.DEVICE) -> Holder:
    return Holder(identity.name, identity.incarnation, identity.role, tier)


def hashes(num_hashes: int, seed: str = "") -> list[bytes]:
    return [blake2b(f"{seed}{i}".encode(), digest_size=16).digest() for i in range(num_hashes)]
