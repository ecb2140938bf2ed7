"""Records in Redis or Valkey, on one server or on one node of a cluster, and `tandem.v1.RecordService` over them.

All keys share a slot, so that one script changes a record and the sums that bound them at once:

    tandem:{records}:values       hash: member -> stamp (16 bytes) + value; a member is tenant + NUL + key
    tandem:{records}:ends         sorted set: member, by the time in seconds at which it is forgotten
    tandem:{records}:uses         sorted set: member, by its last use: a number above those of the uses before it
    tandem:{records}:used         hash: tenant -> bytes of its records; the empty field: of all
    tandem:{records}:of:TENANT    sorted set: the tenant's members, as in `uses`

Room is made by the order of last use and not of the ends: the lease of a response that runs ends soon and is used now.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from services.kvstore.availability import Availability
from services.kvstore.resp.client import RedisClient
from services.kvstore.resp.command import Command, LuaScript, slot_of
from shared.errors import InvalidRequest
from shared.records.records import ALWAYS, STAMP_BYTES, Bounds, Record, Unless, check_record
from shared.rpc.errors import abort, answer
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc

SERVICE_NAME = "tandem.v1.RecordService"
MAX_TTL_S = 400 * 86_400.0
"""Longest life of a record, seconds."""
_PREFIX = b"tandem:{records}:"
_KEYS = tuple(_PREFIX + name for name in (b"values", b"ends", b"uses", b"used"))
_SLOT = slot_of(b"records")
_PURGED_AT_ONCE = 64
Context = grpc.aio.ServicerContext[Any, Any]

_COMMON = """
local VALUES, ENDS, USES, USED = unpack(KEYS)
local tenant = ARGV[1]
local now = tonumber(redis.call('TIME')[1])

local function of(name) return 'tandem:{records}:of:' .. name end

local function drop(member)
  local owner = string.match(member, '^(%Z*)')
  local size = redis.call('HSTRLEN', VALUES, member) + #member - #owner - 1
  redis.call('HDEL', VALUES, member)
  redis.call('ZREM', ENDS, member)
  redis.call('ZREM', USES, member)
  redis.call('ZREM', of(owner), member)
  redis.call('HINCRBY', USED, '', -size)
  if redis.call('HINCRBY', USED, owner, -size) == 0 then redis.call('HDEL', USED, owner) end
end

local function alive(member)
  local ends = redis.call('ZSCORE', ENDS, member)
  if ends and tonumber(ends) > now then return tonumber(ends) end
  if ends then drop(member) end
  return nil
end

local function keep(member, ends)
  local use = tonumber(redis.call('ZRANGE', USES, -1, -1, 'WITHSCORES')[2] or '0') + 1
  redis.call('ZADD', ENDS, ends, member)
  redis.call('ZADD', USES, use, member)
  redis.call('ZADD', of(tenant), use, member)
end

local function used(name) return tonumber(redis.call('HGET', USED, name) or '0') end

local function purge(count)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', ENDS, '-inf', now, 'LIMIT', 0, count)) do drop(member) end
end
"""

_GET = """
local member, ttl = tenant .. '\\0' .. ARGV[2], tonumber(ARGV[3])
local ends = alive(member)
if not ends then return false end
if ttl > 0 then keep(member, math.max(ends, now + ttl)) end
return redis.call('HGET', VALUES, member)
"""

_PUT = """
local key, value, ttl, mode = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local tenant_limit, total_limit, purged = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local member = tenant .. '\\0' .. key
purge(purged)
local found = alive(member) and string.sub(redis.call('HGET', VALUES, member), 1, 16)
if found ~= string.sub(value, 1, 16) then
  if mode == 'absent' and found then return 0 end
  if #mode == 16 and found ~= mode then return 0 end
end
if found then drop(member) end
local size = #value + #key
while used(tenant) + size > tenant_limit do
  local oldest = redis.call('ZRANGE', of(tenant), 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
while used('') + size > total_limit do
  local oldest = redis.call('ZRANGE', USES, 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
redis.call('HSET', VALUES, member, value)
redis.call('HINCRBY', USED, tenant, size)
redis.call('HINCRBY', USED, '', size)
keep(member, now + ttl)
return 1
"""

_DELETE = """
local member = tenant .. '\\0' .. ARGV[2]
if not alive(member) then return 0 end
drop(member)
return 1
"""

_COUNT = """
return redis.call('EXISTS', VALUES, ENDS, USES, USED) + math.max(0, redis.call('HLEN', USED) - 1)
"""

GET = LuaScript(_COMMON + _GET)
"""(tenant, key, seconds to keep it from now on or 0) -> stamp and value, or nothing."""
PUT = LuaScript(_COMMON + _PUT)
"""(tenant, key, stamp and value, seconds to keep it, "" or "absent" or the stamp of what it replaces, limit of the
tenant's bytes, of all, members purged at once) -> 1 where it is written. Idempotent by the stamp."""
DELETE = LuaScript(_COMMON + _DELETE)
"""(tenant, key) -> 1 where there was one."""
COUNT = LuaScript(_COMMON + _COUNT)
"""() -> number of Redis's keys that the records take."""


def count_command() -> Command:
    """Asks for the number of keys that are no blocks of the index."""
    return Command.script(COUNT, _KEYS, ("",), _SLOT)


class RedisRecords:
    """`Records` over a RedisClient, which it does not own."""

    def __init__(self, redis: RedisClient, bounds: Bounds) -> None:
        self._redis = redis
        self.bounds = bounds

    async def get(self, tenant: str, keys: Sequence[str], ttl_s: float = 0.0) -> list[Record | None]:
        """See `Records`."""
        check_record(tenant, keys)
        return [await self.one(tenant, key, ttl_s) for key in keys]

    async def one(self, tenant: str, key: str, ttl_s: float) -> Record | None:
        """A single record; the values of many would be held in memory at once."""
        [found] = await self._redis.call(_script(GET, tenant, key, repr(ttl_s)))
        return Record(key, found[:STAMP_BYTES], found[STAMP_BYTES:]) if found is not None else None

    async def put(
        self, tenant: str, key: str, value: bytes, ttl_s: float, unless: Unless = ALWAYS, stamp: bytes = b""
    ) -> bytes | None:
        """See `Records`. `stamp`: 16 bytes that the writer drew."""
        check_record(tenant, (key,), value, self.bounds)
        mode = b"absent" if unless.exists else unless.changed_from
        limits = (self.bounds.tenant_bytes, self.bounds.total_bytes, _PURGED_AT_ONCE)
        command = _script(PUT, tenant, key, stamp + value, repr(ttl_s), mode, *limits)
        [written] = await self._redis.call(command)
        return stamp if written else None

    async def delete(self, tenant: str, keys: Sequence[str]) -> int:
        """See `Records`."""
        check_record(tenant, keys)
        return sum(await self._redis.call(*(_script(DELETE, tenant, key) for key in keys))) if keys else 0


def _script(script: LuaScript, tenant: str, key: str, *arguments: bytes | str | int) -> Command:
    return Command.script(script, _KEYS, (tenant.encode(), key.encode(), *arguments), _SLOT)


class RecordServicer(kvstore_pb2_grpc.RecordServiceServicer):
    """gRPC's view of the records."""

    def __init__(self, records: RedisRecords, availability: Availability) -> None:
        """Does not close its arguments."""
        self._records = records
        self._availability = availability

    async def GetRecords(  # noqa: N802
        self, request: kvstore_pb2.GetRecordsRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.RecordEntry]:
        """The records that exist."""
        try:
            check_record(request.tenant, request.keys)
            _check_ttl(request.ttl_s, 0.0)
            self._availability.require()
            for key in request.keys:
                found = await self._availability.watched(self._records.one(request.tenant, key, request.ttl_s))
                if found is not None:
                    yield kvstore_pb2.RecordEntry(key=key, stamp=found.stamp, value=found.value)
        except Exception as error:
            await abort(context, error)

    async def PutRecord(  # noqa: N802
        self, request: kvstore_pb2.PutRecordRequest, context: Context
    ) -> kvstore_pb2.PutRecordResponse:
        """Writes a record where its condition holds."""
        return await answer(self._put(request), context)

    async def DeleteRecords(  # noqa: N802
        self, request: kvstore_pb2.DeleteRecordsRequest, context: Context
    ) -> kvstore_pb2.DeleteRecordsResponse:
        """Removes records."""
        return await answer(self._delete(request), context)

    async def _put(self, request: kvstore_pb2.PutRecordRequest) -> kvstore_pb2.PutRecordResponse:
        _check_ttl(request.ttl_s, 1.0)
        replaced = request.if_stamp if request.HasField("if_stamp") else None
        for field, stamp in (("stamp", request.stamp), ("if_stamp", replaced)):
            if stamp is not None and len(stamp) != STAMP_BYTES:
                raise InvalidRequest(f"{field} must have {STAMP_BYTES} bytes", field=field, limit=STAMP_BYTES)
        self._availability.require()
        unless = Unless(replaced or b"", request.if_absent)
        written = await self._availability.watched(
            self._records.put(request.tenant, request.key, request.value, request.ttl_s, unless, request.stamp)
        )
        return kvstore_pb2.PutRecordResponse(written=written is not None)

    async def _delete(self, request: kvstore_pb2.DeleteRecordsRequest) -> kvstore_pb2.DeleteRecordsResponse:
        self._availability.require()
        num_deleted = await self._availability.watched(self._records.delete(request.tenant, request.keys))
        return kvstore_pb2.DeleteRecordsResponse(num_deleted=num_deleted)


def _check_ttl(ttl_s: float, least: float) -> None:
    if not least <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(
            f"ttl_s must be {least:g} to {MAX_TTL_S:g} seconds, got {ttl_s:g}", field="ttl_s", limit=MAX_TTL_S
        )
