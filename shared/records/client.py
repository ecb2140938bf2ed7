"""`Records` of a KV store, which keeps them in Redis for all routers."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from shared.records.records import ALWAYS, STAMP_BYTES, Record, Unless, check_record
from shared.rpc.connection import Connection
from shared.rpc.errors import from_store_error
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

TIMEOUT_S = 5.0
"""Time for one call."""
T = TypeVar("T")


class KVStoreRecords:
    """Connects on first use, reconnects by itself."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`address` is the KV store's host:port; `credentials` are those of mutual TLS."""
        self._address = address
        self._connection = Connection(address, credentials)

    async def get(self, tenant: str, keys: Sequence[str], ttl_s: float = 0.0) -> list[Record | None]:
        """See `Records`."""
        check_record(tenant, keys)
        found: dict[str, Record] = {}

        async def read(stub: kvstore_pb2_grpc.RecordServiceAsyncStub) -> None:
            request = kvstore_pb2.GetRecordsRequest(tenant=tenant, keys=keys, ttl_s=ttl_s)
            async for entry in stub.GetRecords(request, timeout=TIMEOUT_S):
                found[entry.key] = Record(entry.key, entry.stamp, entry.value)

        await self._call(read)
        return [found.get(key) for key in keys]

    async def put(self, tenant: str, key: str, value: bytes, ttl_s: float, unless: Unless = ALWAYS) -> bytes | None:
        """See `Records`."""
        check_record(tenant, (key,), value)
        stamp = secrets.token_bytes(STAMP_BYTES)
        request = kvstore_pb2.PutRecordRequest(tenant=tenant, key=key, value=value, stamp=stamp, ttl_s=ttl_s)
        if unless.exists:
            request.if_absent = True
        elif unless.changed_from:
            request.if_stamp = unless.changed_from
        response = await self._call(lambda stub: stub.PutRecord(request, timeout=TIMEOUT_S))
        return stamp if response.written else None

    async def delete(self, tenant: str, keys: Sequence[str]) -> int:
        """See `Records`."""
        check_record(tenant, keys)
        request = kvstore_pb2.DeleteRecordsRequest(tenant=tenant, keys=keys)
        num_deleted: int = (await self._call(lambda stub: stub.DeleteRecords(request, timeout=TIMEOUT_S))).num_deleted
        return num_deleted

    async def close(self) -> None:
        """Ends the connection; idempotent."""
        await self._connection.close()

    async def _call(self, call: Callable[[kvstore_pb2_grpc.RecordServiceAsyncStub], Awaitable[T]]) -> T:
        try:
            return await call(kvstore_pb2_grpc.RecordServiceStub(self._connection.channel()))
        except grpc.aio.AioRpcError as error:
            raise from_store_error(error, self._address, f"KV store {self._address}") from error
