"""Matches with their spans."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from shared.kv.hashing import HASH_BYTES
from shared.rpc.pb.tandem.v1 import kvstore_pb2
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Span, SpanKind
from shared.telemetry.tracing.span_sink import SpanSink

Match = Callable[[kvstore_pb2.MatchCall], Awaitable[kvstore_pb2.MatchResponse]]


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
