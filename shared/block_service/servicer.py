"""`tandem.v1.BlockService` over a `BlockProvider`: validate, call, convert."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc.aio

from shared.block_service.client import TRACEPARENT, SentBlock
from shared.errors import InvalidRequest
from shared.kv.transfer import TICKET_BITS
from shared.kv_index.holders import split_hashes
from shared.rpc.errors import answer
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Attributes, Span, SpanKind, SpanSink

SERVICE_NAME = "tandem.v1.BlockService"

Context = grpc.aio.ServicerContext[Any, Any]


class BlockProvider(Protocol):
    """Holds blocks and sends them on request. Runs on the event loop."""

    async def look_up(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these blocks it holds."""

    def fetch(
        self, hashes: Sequence[bytes], block_bytes: int, ticket: int, address: bytes
    ) -> AsyncGenerator[list[SentBlock], None]:
        """Sends blocks to `address` on the transfer plane, the last one first, then a trailer; yields the blocks whose
        sends have begun. Closing the generator ends the transfer. Raises ModelMismatch for blocks of another size,
        TransferFailed."""

    async def flush(self, tenant: str | None) -> tuple[int, int]:
        """Drops a tenant's blocks, or all with None; returns the number of blocks and of bytes. Raises InvalidRequest
        for an invalid tenant, or if the provider does not track tenants."""


class BlockServicer(kvstore_pb2_grpc.BlockServiceServicer):
    """Serves one provider over gRPC."""

    def __init__(self, provider: BlockProvider, guard: FleetGuard | None = None, spans: SpanSink | None = None) -> None:
        """Does not close the provider. `guard` checks callers of fetch and flush; None: all. `spans` takes one for each
        fetch that came with a trace."""
        self._spans = spans
        self._provider = provider
        self._guard = guard or FleetGuard()

    async def LookUp(self, request: kvstore_pb2.LookUpRequest, context: Context) -> kvstore_pb2.LookUpResponse:  # noqa: N802
        """Which of the blocks are held."""
        return await answer(self._look_up(request), context)

    async def Fetch(self, request: kvstore_pb2.FetchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802 - the stubs expect a generator
        """Sends blocks."""
        await answer(self._fetch(request, context), context)

    async def Flush(self, request: kvstore_pb2.FlushRequest, context: Context) -> kvstore_pb2.FlushResponse:  # noqa: N802
        """Drops blocks."""
        return await answer(self._flush(request, context), context)

    async def _flush(self, request: kvstore_pb2.FlushRequest, context: Context) -> kvstore_pb2.FlushResponse:
        self._guard.check(context)
        num_blocks, num_bytes = await self._provider.flush(request.tenant if request.HasField("tenant") else None)
        return kvstore_pb2.FlushResponse(num_blocks=num_blocks, num_bytes=num_bytes)

    async def _look_up(self, request: kvstore_pb2.LookUpRequest) -> kvstore_pb2.LookUpResponse:
        held = await self._provider.look_up(split_hashes(request))
        bits = bytearray(-(-len(held) // 8))
        for index, here in enumerate(held):
            bits[index >> 3] |= here << (index & 7)
        return kvstore_pb2.LookUpResponse(held=bytes(bits))

    async def _fetch(self, request: kvstore_pb2.FetchRequest, context: Context) -> None:
        self._guard.check(context)
        names = split_hashes(request)
        if request.ticket >> TICKET_BITS:
            raise InvalidRequest(f"ticket has more than {TICKET_BITS} bits", field="ticket", limit=TICKET_BITS)
        parts = self._provider.fetch(names, request.block_bytes, request.ticket, request.transfer_address)
        num_sent = 0
        with self._traced(context, lambda: {"tandem.blocks_asked": len(names), "tandem.blocks_sent": num_sent}):
            async with contextlib.aclosing(parts):
                async for sent in parts:
                    num_sent += len(sent)
                    part = kvstore_pb2.FetchPart(
                        block_indexes=[block.index for block in sent],
                        checksums=[block.checksum for block in sent],
                        tiers=[kvstore_pb2.Tier.ValueType(block.tier) for block in sent],
                        tags=[block.tag for block in sent if block.tag],
                    )
                    await context.write(part)

    @contextlib.contextmanager
    def _traced(self, context: Context, attributes: Callable[[], Attributes]) -> Iterator[None]:
        """Records a span of the block, where the call has a trace."""
        metadata = dict(context.invocation_metadata() or ()) if self._spans is not None else {}
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._spans is not None and (parent := TraceContext.parse(str(metadata.get(TRACEPARENT, "")))):
                now = time.perf_counter()
                span = Span("send blocks", new_span_id(), parent.span_id, began, now, SpanKind.SERVER, attributes())
                self._spans.record(parent, [span])
