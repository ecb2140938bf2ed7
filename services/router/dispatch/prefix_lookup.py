"""Where a prompt's prefix lies: the index's answer in tokens by worker and tier. The index may be gone."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from services.router.dispatch.record import RequestEvent
from services.router.placement.views import NO_HITS, UNKNOWN_HITS, PrefixHits, PrefixPeer
from services.router.workers.fleet import Fleet
from shared.errors import StoreUnavailable
from shared.identity import WorkerRole
from shared.kv.groups import KVGroups
from shared.kv.hashing import chain
from shared.kv_index.holders import PrefixMatch, Tier
from shared.telemetry.buckets import BucketCounts

if TYPE_CHECKING:
    from services.router.dispatch.active_request import ActiveRequest
    from shared.kv_index.client import KVStoreClient

logger = logging.getLogger(__name__)

ROUND_TRIP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper bounds by which look-ups are counted, seconds."""
MAX_PEERS = 5
"""Workers named as holders of a prefix: of many that hold the same, any."""


class PrefixLookup:
    """Asks the KV store; counts and logs when it does not answer, and never reports that as a miss."""

    def __init__(self, client: KVStoreClient | None, fleet: Fleet) -> None:
        """Without a client every look-up finds nothing."""
        self._client = client
        self._fleet = fleet
        self.available = client is not None
        self.num_errors = 0
        self.round_trips_s = BucketCounts(ROUND_TRIP_BUCKETS)
        """How long each look-up took, failed ones too."""
        self._random = random.Random()

    async def hits_for(self, active: ActiveRequest) -> PrefixHits:
        """`hits` of a request's tokens so far, in its trace where it has one."""
        request, traceparent = active.request, ""
        if request.sampling.prompt_logprobs is not None:
            return NO_HITS  # all is computed: see `AttemptCommands`
        if self._client is not None:
            active.note(RequestEvent.MATCHING)
            traceparent = active.record.traceparent() if request.is_traced else ""
        return await self.hits(
            active.token_ids, request.chain_salt, request.num_prompt_tokens, traceparent, request.adapter
        )

    async def hits(
        self, token_ids: list[int], salt: str, num_prompt_tokens: int, traceparent: str = "", adapter: str = ""
    ) -> PrefixHits:
        """How many of these tokens have their KV where, from the first on; `num_prompt_tokens` of them are the
        client's prompt. `traceparent`: of the span that asks; `adapter`: digest of the request's. Never raises."""
        layout = self._fleet.layout
        if self._client is None or layout is None:
            return UNKNOWN_HITS
        groups = layout.groups
        roots = [self._fleet.hash_root(salt, num_prompt_tokens, adapter)]
        if layout.format.is_converted:  # decode workers hold the same tokens under other names
            roots.append(self._fleet.hash_root(salt, num_prompt_tokens, adapter, WorkerRole.DECODE))
        chains = [chain(root, token_ids, layout.block_size, groups.size) for root in roots]
        if not chains[0]:
            return NO_HITS
        begun = time.perf_counter()
        try:
            asked = [self._client.match(hashes, traceparent, scattered=not groups.is_plain) for hashes in chains]
            matches = await asyncio.gather(*asked) if len(asked) > 1 else [await asked[0]]
        except StoreUnavailable as error:
            self.num_errors += 1
            if self.available:
                logger.warning("the KV store does not answer, prompts are placed without it: %s", error)
            self.available = False
            return UNKNOWN_HITS
        finally:
            self.round_trips_s.add(time.perf_counter() - begun)
        if not self.available:
            logger.info("the KV store answers again")
            self.available = True
        live = {(link.name, link.welcome.worker.incarnation) for link in self._fleet.links if link.welcome is not None}
        hits, *received = (
            hits_of(found, live, layout.block_size) if groups.is_plain else grouped_hits(found, live, groups)
            for found in matches
        )
        if hits.local:
            hits = replace(hits, peers=self._peers(hits.local, layout.block_size))
        for other in received:  # a worker holds a prompt under one of both names
            hits = replace(hits, local={**other.local, **hits.local}, holders=(*hits.holders, *other.holders))
        return hits

    def _peers(self, local: Mapping[str, int], block_size: int) -> tuple[PrefixPeer, ...]:
        """The workers with the longest hits; equals are drawn, so that not all prompts ask the same ones."""
        longest = heapq.nlargest(MAX_PEERS, local.items(), key=lambda item: (item[1], self._random.random()))
        addresses = {link.name: link.address for link in self._fleet.links}
        return tuple(PrefixPeer(name, addresses[name], tokens // block_size) for name, tokens in longest)


def hits_of(match: PrefixMatch, live: Set[tuple[str, int]], block_size: int) -> PrefixHits:
    """The index's answer in tokens; holders that are not in `live` (name, incarnation) are passed over."""
    local: dict[str, int] = {}
    store = num_stored_blocks = 0
    for index, holders in enumerate(match.blocks):
        begin, end = index * block_size, (index + 1) * block_size
        for holder in holders:
            if holder.tier is not Tier.DEVICE:
                store = end if store == begin else store
                num_stored_blocks = index + 1
            elif local.get(holder.worker_name, 0) == begin and (holder.worker_name, holder.incarnation) in live:
                local[holder.worker_name] = end
    return PrefixHits.of(local, store, num_stored_blocks)


def grouped_hits(match: PrefixMatch, live: Set[tuple[str, int]], groups: KVGroups) -> PrefixHits:
    """The same of a scattered match over blocks of KV groups: the longest prefixes that suffice for every group."""
    held: defaultdict[str, set[int]] = defaultdict(set)
    stored: set[int] = set()
    for place, holders in enumerate(match.blocks):
        for holder in holders:
            if holder.tier is not Tier.DEVICE:
                stored.add(place)
            elif (holder.worker_name, holder.incarnation) in live:
                held[holder.worker_name].add(place)
    num_blocks = len(match.blocks) // groups.size

    def longest(places: set[int]) -> int:
        return groups.longest(places.__contains__, num_blocks) * groups.block_size

    local = {name: tokens for name, places in held.items() if (tokens := longest(places))}
    return PrefixHits.of(local, longest(stored), max(stored) // groups.size + 1 if stored else 0)
