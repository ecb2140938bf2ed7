"""Async client of the KV index, for the router (match) and the workers (publish, remove)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from shared.errors import DeadlineExceeded, StoreUnavailable, TandemError, WorkerLost
from shared.identity import WorkerIdentity
from shared.kv_index.holders import EventStamp, PrefixMatch, Tier, join_hashes
from shared.kv_index.match_message import match_from_proto
from shared.kv_index.match_stream import MatchStream
from shared.rpc.connection import Connection
from shared.rpc.convert import role_to_proto
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2

MATCH_TIMEOUT_S = 0.25
WRITE_TIMEOUT_S = 2.0

UNSTAMPED = EventStamp(sequence=0, acknowledged=0)

ResponseT = TypeVar("ResponseT")


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

    async def match(self, hashes: Sequence[bytes], traceparent: str = "") -> PrefixMatch:
        """The longest prefix of the chain `hashes` (16 bytes each) that is held anywhere, with the holders.
        `traceparent`: of the span that asks, by W3C Trace Context."""
        request = kvstore_pb2.MatchRequest(block_hashes=join_hashes(hashes))
        response = await self._match_stream().ask(request, self._match_timeout_s, traceparent)
        try:
            return match_from_proto(response, len(hashes))
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
        """The typed error that the store sent; StoreUnavailable if it sent none."""
        typed = from_rpc_error(error, f"KV store {self.address}")
        if isinstance(typed, WorkerLost | DeadlineExceeded):
            return StoreUnavailable(typed.message, address=self.address)
        return typed


def _worker_id(worker: WorkerIdentity) -> types_pb2.WorkerId:
    return types_pb2.WorkerId(name=worker.name, incarnation=worker.incarnation)
