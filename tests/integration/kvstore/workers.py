"""Workers and hashes for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from hashlib import blake2b

from shared.errors import StoreUnavailable
from shared.identity import WorkerIdentity, WorkerRole
from shared.kv_index.holders import Holder, Tier
from tests.waiting import until


def worker(name: str = "prefill-0", incarnation: int = 1, role: WorkerRole = WorkerRole.PREFILL) -> WorkerIdentity:
    return WorkerIdentity(name, incarnation, role)


def holder(identity: WorkerIdentity, tier: Tier = Tier.DEVICE) -> Holder:
    return Holder(identity.name, identity.incarnation, identity.role, tier)


def hashes(num_hashes: int, seed: str = "") -> list[bytes]:
    return [blake2b(f"{seed}{i}".encode(), digest_size=16).digest() for i in range(num_hashes)]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits until it holds; a store that does not answer meanwhile is asked again."""

    async def holds() -> bool:
        with contextlib.suppress(StoreUnavailable):
            return await condition()
        return False

    await until(holds)
