"""`tandem.v1.StoreService` over a StoreNode: validate, ask, convert."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc.aio

from services.kvstore.node import StoreNode
from services.kvstore.requests import hashes_of
from shared.errors import InvalidRequest, TandemError
from shared.kv.hashing import HASH_BYTES
from shared.kv.transfer import TICKET_BITS, TRAILER_INDEX
from shared.rpc.errors import abort
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.StoreService"

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class StoreServicer(kvstore_pb2_grpc.StoreServiceServicer):
    """gRPC's view of a node."""

    def __init__(self, node: StoreNode) -> None:
        """Does not own it."""
        self._node = node

    async def Offer(self, request: kvstore_pb2.OfferRequest, context: Context) -> kvstore_pb2.OfferResponse:  # noqa: N802
        """Which blocks are wanted."""
        return await _answer(self._offer(request), context)

    async def LookUp(self, request: kvstore_pb2.LookUpRequest, context: Context) -> kvstore_pb2.LookUpResponse:  # noqa: N802
        """How much of a chain is here."""
        return await _answer(self._look_up(request), context)

    async def Fetch(self, request: kvstore_pb2.FetchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802 - the stubs know no servicer that writes itself
        """Sends blocks."""
        await _answer(self._fetch(request, context), context)

    async def GetTierStats(  # noqa: N802
        self, request: kvstore_pb2.GetTierStatsRequest, context: Context
    ) -> kvstore_pb2.TierStatsList:
        """Size and use of each tier."""
        return await _answer(self._tier_stats(request), context)

    async def _tier_stats(self, _request: kvstore_pb2.GetTierStatsRequest) -> kvstore_pb2.TierStatsList:
        stats = kvstore_pb2.TierStatsList()
        for tier in self._node.tiers:
            counters = tier.counters
            stats.tiers.add(
                tier=kvstore_pb2.Tier.ValueType(tier.tier),
                used_bytes=tier.used_bytes,
                budget_bytes=tier.budget_bytes,
                num_hits=counters.num_hits,
                num_misses=counters.num_misses,
                num_stored=counters.num_stored,
                num_evicted=counters.num_evicted,
                num_refused=counters.num_refused,
                num_bad=counters.num_bad,
                failure=self._node.failure(tier.tier),
            )
        return stats

    async def _offer(self, request: kvstore_pb2.OfferRequest) -> kvstore_pb2.OfferResponse:
        wanted = await self._node.offer(request.worker_name, _split(request), request.block_bytes)
        return kvstore_pb2.OfferResponse(
            wanted=wanted.indexes, ticket=wanted.ticket, transfer_address=wanted.transfer_address
        )

    async def _fetch(self, request: kvstore_pb2.FetchRequest, context: Context) -> None:
        names = _split(request)
        if request.ticket >> TICKET_BITS:
            raise InvalidRequest(f"ticket has more than {TICKET_BITS} bits", field="ticket", limit=TICKET_BITS)
        parts = self._node.fetch(names, request.block_bytes, request.ticket, request.transfer_address)
        async with contextlib.aclosing(parts):
            async for sent in parts:
                part = kvstore_pb2.FetchPart(
                    block_indexes=[block.index for block in sent],
                    checksums=[block.checksum for block in sent],
                    tiers=[kvstore_pb2.Tier.ValueType(block.tier) for block in sent],
                )
                await context.write(part)

    async def _look_up(self, request: kvstore_pb2.LookUpRequest) -> kvstore_pb2.LookUpResponse:
        return kvstore_pb2.LookUpResponse(num_blocks=await self._node.look_up(_split(request)))


def _split(
    request: kvstore_pb2.OfferRequest | kvstore_pb2.LookUpRequest | kvstore_pb2.FetchRequest,
) -> list[bytes]:
    """The request's hashes, as many as have an index on the transfer plane."""
    hashes = hashes_of(request)
    names = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    if len(names) > TRAILER_INDEX:
        raise InvalidRequest(
            f"block_hashes has {len(names)} hashes, the limit is {TRAILER_INDEX}",
            field="block_hashes",
            limit=TRAILER_INDEX,
        )
    return names


async def _answer(work: Awaitable[T], context: Context) -> T:
    try:
        return await work
    except TandemError as error:
        await abort(context, error)
    except Exception as error:
        logger.exception("a bug stopped a call")
        await abort(context, error)
