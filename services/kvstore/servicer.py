"""`tandem.v1.KVStoreService` over a BlockIndex: validate, call, convert; every failure becomes a typed error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from services.kvstore.availability import Availability
from services.kvstore.index.block_index import BlockIndex, IndexStats, ResyncNeeded
from services.kvstore.requests import publisher_of, remover_of, stamp_of, tier_of
from shared.errors import TandemError
from shared.identity import WorkerIdentity
from shared.kv.hashing import HASH_BYTES
from shared.kv_index.client import match_to_proto
from shared.kv_index.holders import UNSTAMPED, EventStamp, PrefixMatch, Tier, hashes_of
from shared.rpc.errors import STREAM_OVER, answer, to_proto
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc
from shared.tasks import end_task
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Span, SpanKind, SpanSink

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Match = Callable[[kvstore_pb2.MatchCall], Awaitable[kvstore_pb2.MatchResponse]]
SERVICE_NAME = "tandem.v1.KVStoreService"
T = TypeVar("T")


class MatchStreams:
    """Serves streams until they end or `drain()` ends them."""

    def __init__(self, match: Match, spans: SpanSink | None = None) -> None:
        """`match` answers one request or raises a typed error. `spans` is given the traces that are to be exported."""
        self._match = match
        self._spans = spans
        self._draining = asyncio.Event()
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def serve(self, context: Context) -> None:
        """Returns when the client has ended its stream, or when `drain()` ends it."""
        writing = asyncio.Lock()  # gRPC takes one message at a time
        answers: set[asyncio.Task[None]] = set()

        async def read() -> None:
            while isinstance(call := await context.read(), kvstore_pb2.MatchCall):
                if call.kept_traces and self._spans is not None:
                    self._spans.release(call.kept_traces)
                if not call.HasField("request"):
                    continue  # it asks nothing
                self._begin()
                task = asyncio.create_task(self._answer(call, context, writing))
                answers.add(task)
                task.add_done_callback(answers.discard)

        reader = asyncio.create_task(read())
        draining = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({reader, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, draining, *answers):
                await end_task(task)

    async def drain(self, deadline_s: float) -> None:
        """Ends all streams once no match is running, at the deadline at the latest."""
        await asyncio.wait({asyncio.create_task(self._idle.wait())}, timeout=deadline_s)
        self._draining.set()

    async def _answer(self, call: kvstore_pb2.MatchCall, context: Context, writing: asyncio.Lock) -> None:
        try:
            try:
                answer = kvstore_pb2.MatchAnswer(id=call.id, response=await self._match(call))
            except TandemError as error:
                answer = kvstore_pb2.MatchAnswer(id=call.id, error=to_proto(error))
            except Exception as error:
                logger.exception("a bug stopped a match")
                answer = kvstore_pb2.MatchAnswer(id=call.id, error=to_proto(error))
            async with writing:
                with contextlib.suppress(STREAM_OVER):  # the client has given up on the answer
                    await context.write(answer)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    def _begin(self) -> None:
        self._num_running += 1
        self._idle.clear()


class TracedMatches:
    """Answers a call as `match` does, and records a span where the call has a trace."""

    def __init__(self, match: Match, spans: SpanSink) -> None:
        self._match = match
        self._spans = spans

    async def __call__(self, call: kvstore_pb2.MatchCall) -> kvstore_pb2.MatchResponse:
        """Raises what `match` does."""
        parent = TraceContext.parse(call.traceparent) if call.traceparent else None
        if parent is None:
            return await self._match(call)
        began = time.perf_counter()
        span = Span("match", new_span_id(), parent.span_id, began, began, SpanKind.SERVER)
        num_blocks = len(call.request.block_hashes) // HASH_BYTES
        try:
            response = await self._match(call)
            num_found = sum(run.num_blocks for run in response.blocks)
            span.attributes = {"tandem.blocks_asked": num_blocks, "tandem.blocks_found": num_found}
            return response
        except Exception as error:
            span.error = str(error)
            span.attributes = {
                "tandem.blocks_asked": num_blocks,
                "error.type": getattr(error, "code", type(error).__name__),
            }
            raise
        finally:
            span.ended = time.perf_counter()
            self._spans.record(parent, [span])


@dataclass(slots=True)
class IndexCounters:
    """Sums since start, of calls that the index answered."""

    num_matches: int = 0
    num_match_blocks: int = 0
    num_hit_blocks: int = 0
    num_published_blocks: int = 0
    num_removed_blocks: int = 0
    num_resyncs: int = 0


class CountedIndex:
    """`BlockIndex` over another one, which it owns."""

    def __init__(self, index: BlockIndex) -> None:
        self.counters = IndexCounters()
        self._index = index

    async def start(self) -> None:
        """See BlockIndex."""
        await self._index.start()

    async def match(self, hashes: bytes, *, scattered: bool = False) -> PrefixMatch:
        """See BlockIndex."""
        match = await self._index.match(hashes, scattered=scattered)
        self.counters.num_matches += 1
        self.counters.num_match_blocks += len(hashes) // HASH_BYTES
        self.counters.num_hit_blocks += sum(map(bool, match.blocks))
        return match

    async def publish(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = UNSTAMPED) -> int:
        """See BlockIndex."""
        try:
            num_blocks = await self._index.publish(worker, tier, hashes, stamp)
        except ResyncNeeded:
            self.counters.num_resyncs += 1
            raise
        self.counters.num_published_blocks += num_blocks
        return num_blocks

    async def remove(self, worker: WorkerIdentity, tier: Tier, hashes: bytes, stamp: EventStamp = UNSTAMPED) -> int:
        """See BlockIndex."""
        try:
            num_blocks = await self._index.remove(worker, tier, hashes, stamp)
        except ResyncNeeded:
            self.counters.num_resyncs += 1
            raise
        self.counters.num_removed_blocks += num_blocks
        return num_blocks

    async def forget_all(self) -> int:
        """See BlockIndex."""
        return await self._index.forget_all()

    async def stats(self) -> IndexStats:
        """See BlockIndex."""
        return await self._index.stats()

    async def probe(self) -> None:
        """See BlockIndex."""
        await self._index.probe()

    async def close(self) -> None:
        """See BlockIndex."""
        await self._index.close()


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
        """Answers a client's matches, in their order, on one stream."""
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
        return match_to_proto(await self._index.match(hashes, scattered=request.scattered))

    async def _streamed_match(self, call: kvstore_pb2.MatchCall) -> kvstore_pb2.MatchResponse:
        return await self._availability.watched(self._match(call.request))

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
        return await answer(self._availability.watched(work), context)
