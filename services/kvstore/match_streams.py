"""The server side of match streams: a stream carries many concurrent matches, answered in any order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from shared.errors import TandemError
from shared.kv.hashing import HASH_BYTES
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import kvstore_pb2
from shared.tasks import end_task
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Span, SpanKind, SpanSink

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Match = Callable[[kvstore_pb2.MatchCall], Awaitable[kvstore_pb2.MatchResponse]]


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
