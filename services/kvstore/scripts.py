"""The index's writes as Lua scripts: Redis runs each of them atomically, so publishers cannot undo each other.

Why scripts and not APPEND with duplicates dropped on reading: a worker that publishes the same system prompt a
thousand times must not grow its value, registration must be decided in the same instant as the write that relies
on it, and reads (the hot path) stay plain MGETs of minimal values. Blocks are read and written in groups of 256 with
MGET and MSET, which costs Redis about 1 µs a block.

Keys are computed inside the scripts from one string of hashes (a fifth of the bytes of declared keys): right for one
server, and a script sees only the keys of its own node.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from services.kvstore.records import BLOCK_PREFIX, HOLDERS_KEY, RECORD, RETIRED_KEY, VERSION_KEY
from shared.kv.hashing import HASH_BYTES

SUPERSEDED = -1
"""What PUBLISH returns to an incarnation that a newer one has replaced."""
OTHER_EPOCH = -1
"""What SWEEP returns when the index was emptied since the table was read."""

_COMMON = f"""
local VERSION, HOLDERS, RETIRED = '{VERSION_KEY.decode()}', '{HOLDERS_KEY.decode()}', '{RETIRED_KEY.decode()}'
local HASH, RECORD, GROUP = {HASH_BYTES}, {RECORD.size}, 256

local function position(value, record)
  local from = 1
  while true do
    local at = string.find(value, record, from, true)
    if not at or (at - 1) % RECORD == 0 then return at end
    from = at + 1
  end
end

local function each_group(hashes, visit)
  for first = 1, #hashes, HASH * GROUP do
    local keys = {{}}
    for at = first, math.min(first + HASH * GROUP, #hashes + 1) - 1, HASH do
      keys[#keys + 1] = '{BLOCK_PREFIX.decode()}' .. string.sub(hashes, at, at + HASH - 1)
    end
    visit(keys, redis.call('MGET', unpack(keys)))
  end
end

local function store(writes, deletes)
  if #writes > 0 then redis.call('MSET', unpack(writes)) end
  if #deletes > 0 then redis.call('DEL', unpack(deletes)) end
end
"""

_PUBLISH = """
local incarnation, name, role, tier, new_epoch, hashes = unpack(ARGV)
local identity, newest = incarnation .. name, incarnation .. role
local id = redis.call('HGET', HOLDERS, 'i:' .. identity)
local known = redis.call('HGET', HOLDERS, 'w:' .. name)
if id then
  if string.sub(known, 1, 8) ~= incarnation then return -1 end
else
  if redis.call('ZSCORE', RETIRED, identity) then return -1 end
  id = redis.call('HINCRBY', HOLDERS, 'next', 1)
  redis.call('HSET', HOLDERS, 'i:' .. identity, id, 'h:' .. id, identity)
end
if known ~= newest then
  redis.call('HSET', HOLDERS, 'w:' .. name, newest)
  local version = redis.call('GET', VERSION) or new_epoch .. struct.pack('<I8', 0)
  local changes = struct.unpack('<I8', string.sub(version, 9)) + 1
  redis.call('SET', VERSION, string.sub(version, 1, 8) .. struct.pack('<I8', changes))
end
local record, added = struct.pack('<I4', tonumber(id)) .. tier, 0
each_group(hashes, function(keys, values)
  local writes = {}
  for i, key in ipairs(keys) do
    local value = values[i] or ''
    if not position(value, record) then
      writes[#writes + 1] = key
      writes[#writes + 1] = value .. record
    end
  end
  store(writes, {})
  added = added + #writes / 2
end)
return added
"""

_REMOVE = """
local incarnation, name, tier, hashes = unpack(ARGV)
local id = redis.call('HGET', HOLDERS, 'i:' .. incarnation .. name)
if not id then return 0 end
local record, removed = struct.pack('<I4', tonumber(id)) .. tier, 0
each_group(hashes, function(keys, values)
  local writes, deletes = {}, {}
  for i, key in ipairs(keys) do
    local value = values[i] or ''
    local at = position(value, record)
    if at then
      removed = removed + 1
      if #value == RECORD then
        deletes[#deletes + 1] = key
      else
        writes[#writes + 1] = key
        writes[#writes + 1] = string.sub(value, 1, at - 1) .. string.sub(value, at + RECORD)
      end
    end
  end
  store(writes, deletes)
end)
return removed
"""

_SWEEP = """
local epoch, cursor, count = ARGV[1], ARGV[2], ARGV[3]
if string.sub(redis.call('GET', VERSION) or '', 1, 8) ~= epoch then return {'0', -1} end
local dead = {}
for i = 4, #ARGV do dead[struct.pack('<I4', tonumber(ARGV[i]))] = true end
local found, hashes = redis.call('SCAN', cursor, 'MATCH', 'b:*', 'COUNT', count), {}
for i, key in ipairs(found[2]) do hashes[i] = string.sub(key, 3) end
local pruned = 0
each_group(table.concat(hashes), function(keys, values)
  local writes, deletes = {}, {}
  for i, key in ipairs(keys) do
    local value, kept = values[i] or '', {}
    for at = 1, #value, RECORD do
      if not dead[string.sub(value, at, at + 3)] then kept[#kept + 1] = string.sub(value, at, at + RECORD - 1) end
    end
    local num_dead = #value / RECORD - #kept
    if num_dead > 0 then
      pruned = pruned + num_dead
      if #kept == 0 then
        deletes[#deletes + 1] = key
      else
        writes[#writes + 1] = key
        writes[#writes + 1] = table.concat(kept)
      end
    end
  end
  store(writes, deletes)
end)
return {found[1], pruned}
"""

_RETIRE = """
local epoch, now, oldest = ARGV[1], ARGV[2], ARGV[3]
if string.sub(redis.call('GET', VERSION) or '', 1, 8) ~= epoch then return 0 end
redis.call('ZREMRANGEBYSCORE', RETIRED, '-inf', oldest)
for i = 4, #ARGV do
  local id = redis.call('HGET', HOLDERS, 'i:' .. ARGV[i])
  if id then
    redis.call('HDEL', HOLDERS, 'i:' .. ARGV[i], 'h:' .. id)
    redis.call('ZADD', RETIRED, now, ARGV[i])
  end
end
return #ARGV - 3
"""


@dataclass(frozen=True, slots=True)
class LuaScript:
    """A script and the name that EVALSHA knows it by."""

    source: str

    @property
    def sha(self) -> str:
        """SHA-1 of the source, in hex: Redis's own naming, nothing to do with security."""
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


PUBLISH = LuaScript(_COMMON + _PUBLISH)
"""(incarnation, name, role, tier, epoch if the index is new, hashes) -> records added, or SUPERSEDED.

Registers the worker where needed. Publishing again adds nothing."""

REMOVE = LuaScript(_COMMON + _REMOVE)
"""(incarnation, name, tier, hashes) -> records removed. A block without holders loses its key."""

SWEEP = LuaScript(_COMMON + _SWEEP)
"""(epoch, cursor, count, dead id…) -> (next cursor, records pruned or OTHER_EPOCH): one step over the key space."""

RETIRE = LuaScript(_COMMON + _RETIRE)
"""(epoch, now_s, forget up to, dead identity…) -> 0 for another epoch: ids that no record names any more go."""
