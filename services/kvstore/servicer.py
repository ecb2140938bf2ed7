"""`tandem.v1.KVStoreService` over a BlockIndex: validate, call, convert; every failure becomes a typed error."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc.aio

from services.kvstore.availability import Availability
from services.kvstore.counted_index import CountedIndex
from services.kvstore.index import ResyncNeeded
from services.kvstore.match_streams import MatchStreams, TracedMatches
from services.kvstore.requests import publisher_of, remover_of, stamp_of, tier_of
from shared.errors import StoreUnavailable
from shared.kv_index.hash_lists import hashes_of
from shared.kv_index.match_message import match_to_proto
from shared.rpc.errors import answer
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc
from shared.telemetry.tracing.span import SpanSink

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.KVStoreService"

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class KVStoreServicer(kvstore_pb2_grpc.KVStoreServiceServicer):
    """gRPC's view of the index. The counts in its statistics are this process's, since its start."""

    def __init__(self, index: CountedIndex, availability: Availability, spans: SpanSink | None = None) -> None:
        """Does not close its arguments. `spans` takes one for each streamed match that comes with a trace."""
        self._index = index
        self._availability = availability
        match = self._streamed_match
        self._streams = MatchStreams(match if spans is None else TracedMatches(match, spans), spans)

    async def Match(  # noqa: N802
        self, request: kvstore_pb2.MatchRequest, context: Context
    ) -> kvstore_pb2.MatchResponse:
        """The holders of the prompt's prefix."""
        return await self._answer(self._match(request), context)

    async def MatchStream(  # type: ignore[override]  # noqa: N802 - the stubs do not know servicers that write by hand
        self, _calls: AsyncIterator[kvstore_pb2.MatchCall], context: Context
    ) -> None:
        """Many matches over one stream."""
        await self._streams.serve(context)

    async def drain(self, deadline_s: float) -> None:
        """Ends the streams once their running matches are answered, or at the deadline."""
        await self._streams.drain(deadline_s)

    async def Publish(  # noqa: N802
        self, request: kvstore_pb2.PublishRequest, context: Context
    ) -> kvstore_pb2.PublishResponse:
        """Adds a worker's blocks."""
        return await self._answer(self._publish(request), context)

    async def Remove(  # noqa: N802
        self, request: kvstore_pb2.RemoveRequest, context: Context
    ) -> kvstore_pb2.RemoveResponse:
        """Removes a worker's blocks."""
        return await self._answer(self._remove(request), context)

    async def GetStats(  # noqa: N802
        self, request: kvstore_pb2.GetStatsRequest, context: Context
    ) -> kvstore_pb2.StoreStats:
        """Size and use."""
        return await self._answer(self._stats(request), context)

    async def Rebuild(  # noqa: N802
        self, request: kvstore_pb2.RebuildRequest, context: Context
    ) -> kvstore_pb2.RebuildResponse:
        """Forgets all holders; each publishes all its blocks again."""
        return await self._answer(self._rebuild(request), context)

    async def _match(self, request: kvstore_pb2.MatchRequest) -> kvstore_pb2.MatchResponse:
        hashes = hashes_of(request)
        self._availability.require()
        return match_to_proto(await self._index.match(hashes))

    async def _streamed_match(self, call: kvstore_pb2.MatchCall) -> kvstore_pb2.MatchResponse:
        try:
            return await self._match(call.request)
        except StoreUnavailable:
            self._availability.suspect()
            raise

    async def _publish(self, request: kvstore_pb2.PublishRequest) -> kvstore_pb2.PublishResponse:
        worker, tier, hashes, stamp = publisher_of(request), tier_of(request), hashes_of(request), stamp_of(request)
        self._availability.require()
        try:
            await self._index.publish(worker, tier, hashes, stamp)
        except ResyncNeeded:
            return kvstore_pb2.PublishResponse(resync=True)
        return kvstore_pb2.PublishResponse()

    async def _remove(self, request: kvstore_pb2.RemoveRequest) -> kvstore_pb2.RemoveResponse:
        worker, tier, hashes, stamp = remover_of(request), tier_of(request), hashes_of(request), stamp_of(request)
        self._availability.require()
        try:
            await self._index.remove(worker, tier, hashes, stamp)
        except ResyncNeeded:
            return kvstore_pb2.RemoveResponse(resync=True)
        return kvstore_pb2.RemoveResponse()

    async def _stats(self, _request: kvstore_pb2.GetStatsRequest) -> kvstore_pb2.StoreStats:
        self._availability.require()
        stats, counters = await self._index.stats(), self._index.counters
        return kvstore_pb2.StoreStats(
            num_blocks=stats.num_blocks,
            num_match_requests=counters.num_matches,
            num_match_blocks=counters.num_match_blocks,
            num_hit_blocks=counters.num_hit_blocks,
            index_bytes=stats.index_bytes,
            index_address=stats.address,
        )

    async def _rebuild(self, _request: kvstore_pb2.RebuildRequest) -> kvstore_pb2.RebuildResponse:
        self._availability.require()
        num_holders = await self._index.forget_all()
        logger.warning("the index is rebuilt: %d holders were forgotten and publish again", num_holders)
        return kvstore_pb2.RebuildResponse(num_holders=num_holders)

    async def _answer(self, work: Awaitable[T], context: Context) -> T:
        return await answer(self._suspecting(work), context)

    async def _suspecting(self, work: Awaitable[T]) -> T:
        """Starts a probe of the index after any failed call on it."""
        try:
            return await work
        except StoreUnavailable:
            self._availability.suspect()
            raise
