"""Async client of `BlockService`, which store nodes and workers serve: look up, fetch and flush blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc.aio

from shared.errors import StoreUnavailable
from shared.kv_index.holders import Tier, join_hashes
from shared.rpc.connection import Connection
from shared.rpc.errors import from_store_error
from shared.rpc.fleet_identity import fleet_metadata
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

LOOK_UP_TIMEOUT_S = 0.25
TRACEPARENT = "traceparent"
"""Metadata of a call: of the span that it is a part of, by W3C Trace Context."""


@dataclass(frozen=True, slots=True)
class SentBlock:
    """A block that the holder has begun to send."""

    index: int
    """Index among the request's hashes."""
    checksum: int
    tier: Tier
    """The tier from which the holder read it."""
    tag: bytes = b""
    """Tag of the block by the fetch's seal, in a fleet with a key."""


class BlockClient:
    """One holder of blocks. Connects on first use, reconnects by itself; safe for any number of concurrent calls.

    Every method raises StoreUnavailable when the holder does not answer in time (at once if that is known), and the
    typed errors that the holder sends.
    """

    def __init__(
        self,
        address: str,
        *,
        look_up_timeout_s: float = LOOK_UP_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
    ) -> None:
        """`address` is host:port; `credentials` are those of mutual TLS, `token` is `FleetKey.token()`."""
        self._metadata = fleet_metadata(token)
        self.address = address
        self._look_up_timeout_s = look_up_timeout_s
        self._connection = Connection(address, credentials)
        self._closed = False

    async def look_up(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these blocks the holder has."""
        request = kvstore_pb2.LookUpRequest(block_hashes=join_hashes(hashes))
        stub = kvstore_pb2_grpc.BlockServiceStub(self.connected())
        try:
            held = (await stub.LookUp(request, timeout=self._look_up_timeout_s)).held
        except grpc.aio.AioRpcError as error:
            raise from_store_error(error, self.address) from error
        if 8 * len(held) < len(hashes):
            raise StoreUnavailable(f"{self.address} answered for fewer blocks than requested")
        return [bool(held[index >> 3] >> (index & 7) & 1) for index in range(len(hashes))]

    async def fetch(
        self,
        hashes: Sequence[bytes],
        block_bytes: int,
        ticket: int,
        transfer_address: bytes,
        timeout_s: float,
        traceparent: str = "",
    ) -> AsyncGenerator[list[SentBlock], None]:
        """Asks the holder to send blocks to the receives posted under `ticket` at `transfer_address`, the last block
        first. Yields the blocks whose sends have begun, batch by batch. `traceparent` goes with the call."""
        request = kvstore_pb2.FetchRequest(
            block_hashes=join_hashes(hashes), block_bytes=block_bytes, ticket=ticket, transfer_address=transfer_address
        )
        metadata = (*(self._metadata or ()), (TRACEPARENT, traceparent)) if traceparent else self._metadata
        call = kvstore_pb2_grpc.BlockServiceStub(self.connected()).Fetch(request, timeout=timeout_s, metadata=metadata)
        try:
            async for part in call:
                if any(index >= len(hashes) for index in part.block_indexes):
                    raise StoreUnavailable(f"{self.address} sends blocks that were not requested")
                tags = part.tags or [b""] * len(part.block_indexes)
                yield [
                    SentBlock(index, checksum, Tier(tier), tag)
                    for index, checksum, tier, tag in zip(
                        part.block_indexes, part.checksums, part.tiers, tags, strict=True
                    )
                ]
        except grpc.aio.AioRpcError as error:
            raise from_store_error(error, self.address) from error
        finally:
            call.cancel()

    async def flush(self, tenant: str | None, timeout_s: float) -> kvstore_pb2.FlushResponse:
        """Drops a tenant's blocks, or all. Raises InvalidRequest if the holder does not track tenants."""
        stub = kvstore_pb2_grpc.BlockServiceStub(self.connected())
        try:
            return await stub.Flush(kvstore_pb2.FlushRequest(tenant=tenant), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_store_error(error, self.address) from error

    async def close(self) -> None:
        """Ends the connection; idempotent."""
        self._closed = True
        await self._connection.close()

    def connected(self) -> grpc.aio.Channel:
        """The channel of a new call, also for the other services of a holder. Raises StoreUnavailable once closed."""
        if self._closed:
            raise StoreUnavailable(f"the client of {self.address} is closed")
        return self._connection.channel()
