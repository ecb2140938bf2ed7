"""Where a prompt's prefix lies: the index's answer as hit tokens by worker. The index may be gone; requests go on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.router.fleet import Fleet
from shared.errors import StoreUnavailable
from shared.kv.hashing import chain
from shared.rpc.block_holders import WorkerRole

if TYPE_CHECKING:
    from shared.rpc.kvstore_client import KVStoreClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """What the fleet has of one prompt."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    """By worker name, how many tokens of the prompt lie in its pool, from the first on."""
    num_stored_blocks: int | None = None
    """Blocks up to the last one that a store has; None where the index did not answer."""


class PrefixLookup:
    """Asks the KV store; counts and tells when it does not answer, and never passes that off as a miss."""

    def __init__(self, client: KVStoreClient | None, fleet: Fleet) -> None:
        """Without a client every look-up finds nothing."""
        self._client = client
        self._fleet = fleet
        self.available = client is not None
        self.num_errors = 0

    async def find(self, token_ids: list[int], salt: str) -> PrefixHits:
        """Who has how much of the prompt. Never raises."""
        layout = self._fleet.layout
        if self._client is None or layout is None:
            return PrefixHits()
        hashes = chain(self._fleet.hash_root(salt), token_ids, layout.block_size)
        if not hashes:
            return PrefixHits(num_stored_blocks=0)
        try:
            match = await self._client.match(hashes)
        except StoreUnavailable as error:
            self.num_errors += 1
            if self.available:
                logger.warning("the KV store does not answer, prompts are placed without it: %s", error)
            self.available = False
            return PrefixHits()
        if not self.available:
            logger.info("the KV store answers again")
            self.available = True
        live = {(link.name, link.welcome.worker.incarnation) for link in self._fleet.links if link.welcome is not None}
        hits: dict[str, int] = {}
        num_stored_blocks = 0
        for index, holders in enumerate(match.blocks):
            for holder in holders:
                key = (holder.worker_name, holder.incarnation)
                if key in live and hits.get(holder.worker_name, 0) == index * layout.block_size:
                    hits[holder.worker_name] = (index + 1) * layout.block_size
                elif holder.role is WorkerRole.STORE:
                    num_stored_blocks = index + 1
        return PrefixHits(hits, num_stored_blocks)
