"""Async client of the KV index, for the router (match) and the workers (publish, remove)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import grpc.aio

from shared.errors import StoreUnavailable, TandemError
from shared.identity import WorkerIdentity
from shared.kv_index.holders import UNSTAMPED, EventStamp, Holder, PrefixMatch, Tier, join_hashes
from shared.rpc.connection import Connection
from shared.rpc.convert import role_from_proto, role_to_proto
from shared.rpc.errors import from_proto, from_store_error
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2

Stream = grpc.aio.StreamStreamCall[kvstore_pb2.MatchCall, kvstore_pb2.MatchAnswer]
MATCH_TIMEOUT_S = 0.25
WRITE_TIMEOUT_S = 2.0
ResponseT = TypeVar("ResponseT")


class MatchStream:
    """One stream to one store, for any number of concurrent requests. A broken stream stays broken (`is_open`); its
    owner opens a new one."""

    def __init__(self, stream: Stream, address: str, translate: Callable[[grpc.aio.AioRpcError], TandemError]) -> None:
        """Owns the stream and starts the task that reads it. `translate` turns gRPC's errors into typed ones."""
        self._stream = stream
        self._address = address
        self._translate = translate
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[kvstore_pb2.MatchAnswer]] = {}
        self._broken: TandemError | None = None
        self._calls: deque[kvstore_pb2.MatchCall] = deque()  # not sent yet
        self._kept: list[bytes] = []  # ids of traces that the store is to keep
        # gRPC allows one write at a time, and ends the stream where one is cancelled: no request writes itself.
        self._writer: asyncio.Task[None] | None = None
        self._reader = asyncio.create_task(self._read(), name="match stream")

    @property
    def is_open(self) -> bool:
        """False once broken or closed."""
        return self._broken is None

    async def ask(
        self, request: kvstore_pb2.MatchRequest, timeout_s: float, traceparent: str = ""
    ) -> kvstore_pb2.MatchResponse:
        """The store's answer; `traceparent` as in MatchCall. Raises StoreUnavailable if none comes in time, or the
        typed error in the answer."""
        if self._broken is not None:
            raise self._broken
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._calls.append(kvstore_pb2.MatchCall(id=number, request=request, traceparent=traceparent))
            self._send()
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError as error:
            message = f"KV store {self._address} did not answer in time"
            raise StoreUnavailable(message, address=self._address) from error
        finally:
            del self._waiting[number]
            if future.done() and not future.cancelled():
                future.exception()  # read, or asyncio logs an error of the stream that came before this was written
        if answer.HasField("error"):
            raise from_proto(answer.error)
        response: kvstore_pb2.MatchResponse = answer.response
        return response

    def keep_trace(self, trace_id: bytes) -> None:
        """Passes it on in a call that asks nothing: see MatchCall. Does not block."""
        self._kept.append(trace_id)
        self._send()

    def _send(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="match stream's writer")

    async def _write(self) -> None:
        while (self._calls or self._kept) and self.is_open:
            if self._calls:
                call = self._calls.popleft()
                if call.id not in self._waiting:
                    continue  # its answer is not awaited any more
            else:
                call, self._kept = kvstore_pb2.MatchCall(kept_traces=self._kept), []
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader notices it
                await self._stream.write(call)

    async def close(self) -> None:
        """Ends the stream; waiting requests get StoreUnavailable. Idempotent."""
        self._stream.cancel()
        await asyncio.wait({self._reader, *({self._writer} if self._writer is not None else ())})

    async def _read(self) -> None:
        broken: TandemError = StoreUnavailable(f"KV store {self._address} ended the stream", address=self._address)
        try:
            while isinstance(answer := await self._stream.read(), kvstore_pb2.MatchAnswer):
                future = self._waiting.get(answer.id)
                if future is not None and not future.done():
                    future.set_result(answer)
        except grpc.aio.AioRpcError as error:
            broken = self._translate(error)
        except asyncio.CancelledError:
            pass  # by `close`, or by the end of the event loop
        self._broken = broken
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(broken)


def match_to_proto(match: PrefixMatch) -> kvstore_pb2.MatchResponse:
    """The message. Adjacent blocks with the same holders, which is common, become one entry."""
    indexes: dict[Holder, int] = {}
    runs = [
        kvstore_pb2.BlockHolders(
            holders=[indexes.setdefault(holder, len(indexes)) for holder in holders], num_blocks=sum(1 for _ in run)
        )
        for holders, run in groupby(match.blocks)
    ]
    return kvstore_pb2.MatchResponse(holders=[_to_proto(holder) for holder in indexes], blocks=runs)


def match_from_proto(message: kvstore_pb2.MatchResponse, max_blocks: int, *, scattered: bool = False) -> PrefixMatch:
    """The inverse of `match_to_proto`, for a request of `max_blocks` blocks.

    Raises ValueError or IndexError for a malformed message.
    """
    holders = [_from_proto(holder) for holder in message.holders]
    blocks: list[tuple[Holder, ...]] = []
    for run in message.blocks:
        if not run.num_blocks or not (run.holders or scattered):
            raise ValueError("a run without blocks or without holders")
        if len(blocks) + run.num_blocks > max_blocks:
            raise ValueError(f"more than the {max_blocks} requested blocks")
        blocks += [tuple(holders[number] for number in run.holders)] * run.num_blocks
    return PrefixMatch(tuple(blocks))


def _to_proto(holder: Holder) -> kvstore_pb2.Holder:
    return kvstore_pb2.Holder(
        worker=types_pb2.WorkerId(name=holder.worker_name, incarnation=holder.incarnation),
        role=role_to_proto(holder.role),
        tier=kvstore_pb2.Tier.ValueType(holder.tier),
    )


def _from_proto(message: kvstore_pb2.Holder) -> Holder:
    worker = message.worker
    return Holder(worker.name, worker.incarnation, role_from_proto(message.role), Tier(message.tier))


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size of the index, and the match requests of one store process since it started."""

    num_blocks: int
    num_match_requests: int
    num_match_blocks: int
    num_hit_blocks: int
    index_bytes: int
    index_address: str


class KVStoreClient:
    """One KV store. Connects on first use, reconnects by itself; safe for any number of concurrent calls.

    Every method raises StoreUnavailable within its timeout when the store or its Redis does not answer (at once if
    that is known), and InvalidRequest if the store refuses the arguments.
    """

    def __init__(
        self,
        address: str,
        *,
        match_timeout_s: float = MATCH_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`address` is host:port; `credentials` are those of mutual TLS."""
        self.address = address
        self._match_timeout_s = match_timeout_s
        self._write_timeout_s = write_timeout_s
        self._connection = Connection(address, credentials)
        self._channel: grpc.aio.Channel | None = None  # of the stub
        self._stub: kvstore_pb2_grpc.KVStoreServiceAsyncStub | None = None
        self._matches: MatchStream | None = None
        self._closed = False

    async def match(self, hashes: Sequence[bytes], traceparent: str = "", *, scattered: bool = False) -> PrefixMatch:
        """The longest prefix of the chain `hashes` (16 bytes each) that is held anywhere, with the holders.
        `scattered`: all blocks, also behind one that nobody holds. `traceparent`: of the span that asks, by W3C Trace
        Context."""
        request = kvstore_pb2.MatchRequest(block_hashes=join_hashes(hashes), scattered=scattered)
        response = await self._match_stream().ask(request, self._match_timeout_s, traceparent)
        try:
            return match_from_proto(response, len(hashes), scattered=scattered)
        except (ValueError, IndexError) as error:
            raise StoreUnavailable(f"KV store {self.address} gave a malformed answer: {error}") from error

    def keep_trace(self, trace_id: bytes) -> None:
        """The store's spans of this trace (16 bytes), which was not sampled, are to be exported. Does not block; a
        no-op where no match was asked lately."""
        if self._matches is not None and self._matches.is_open:
            self._matches.keep_trace(trace_id)

    async def publish(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE, stamp: EventStamp = UNSTAMPED
    ) -> bool:
        """Declares that `worker` holds these blocks. Idempotent; without hashes it is a heartbeat.

        Returns False for a stamped change if the index has lost earlier ones: then nothing was changed, and everything
        must be published again. Raises InvalidRequest (field worker.incarnation) if a newer process of that name has
        published.
        """
        request = kvstore_pb2.PublishRequest(
            worker=_worker_id(worker),
            role=role_to_proto(worker.role),
            tier=kvstore_pb2.Tier.ValueType(tier),
            block_hashes=join_hashes(hashes),
            sequence=stamp.sequence,
            acknowledged=stamp.acknowledged,
            reset=stamp.reset,
        )
        response = await self._call(lambda stub: stub.Publish(request, timeout=self._write_timeout_s))
        return not response.resync

    async def remove(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE, stamp: EventStamp = UNSTAMPED
    ) -> bool:
        """Declares that `worker` no longer holds these blocks. Idempotent; False as for `publish`."""
        request = kvstore_pb2.RemoveRequest(
            worker=_worker_id(worker),
            tier=kvstore_pb2.Tier.ValueType(tier),
            block_hashes=join_hashes(hashes),
            sequence=stamp.sequence,
            acknowledged=stamp.acknowledged,
        )
        response = await self._call(lambda stub: stub.Remove(request, timeout=self._write_timeout_s))
        return not response.resync

    async def stats(self) -> StoreStats:
        """Size of the index and use of this store process."""
        request = kvstore_pb2.GetStatsRequest()
        stats = await self._call(lambda stub: stub.GetStats(request, timeout=self._write_timeout_s))
        return StoreStats(
            num_blocks=stats.num_blocks,
            num_match_requests=stats.num_match_requests,
            num_match_blocks=stats.num_match_blocks,
            num_hit_blocks=stats.num_hit_blocks,
            index_bytes=stats.index_bytes,
            index_address=stats.index_address,
        )

    async def rebuild(self) -> int:
        """Drops all holders and returns how many. Their entries are dead at once, and each publishes again."""
        request = kvstore_pb2.RebuildRequest()
        return (await self._call(lambda stub: stub.Rebuild(request, timeout=self._write_timeout_s))).num_holders

    async def close(self) -> None:
        """Ends the connection; idempotent."""
        self._closed = True
        self._stub = None
        if self._matches is not None:
            await self._matches.close()
        await self._connection.close()

    async def _call(
        self,
        call: Callable[[kvstore_pb2_grpc.KVStoreServiceAsyncStub], Awaitable[ResponseT]],
    ) -> ResponseT:
        try:
            return await call(self._connected())
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    def _match_stream(self) -> MatchStream:
        """The open stream, or a new one where that has ended or its connection was replaced."""
        stub = self._connected()
        if self._matches is None or not self._matches.is_open:
            self._matches = MatchStream(stub.MatchStream(), self.address, self._translate)
        return self._matches

    def _connected(self) -> kvstore_pb2_grpc.KVStoreServiceAsyncStub:
        if self._closed:
            raise StoreUnavailable(f"the client of KV store {self.address} is closed")
        channel = self._connection.channel()
        if self._stub is None or channel is not self._channel:
            self._stub, self._channel = kvstore_pb2_grpc.KVStoreServiceStub(channel), channel
            self._matches = None  # a stream of the channel before ends with it
        return self._stub

    def _translate(self, error: grpc.aio.AioRpcError) -> TandemError:
        return from_store_error(error, self.address, f"KV store {self.address}")


def _worker_id(worker: WorkerIdentity) -> types_pb2.WorkerId:
    return types_pb2.WorkerId(name=worker.name, incarnation=worker.incarnation)
