"""The index's writes as Lua scripts: Redis runs each atomically, so publishers cannot overwrite each other's changes.

Why scripts and not APPEND with duplicates dropped on reading: a system prompt published a thousand times must not grow
its blocks' values, and reads (the hot path) stay plain MGETs of minimal values. Blocks are read and written in groups
of 256 with MGET and MSET, which costs Redis about 1 µs a block.

The scripts compute the keys of blocks from a prefix and one string of hashes (a fifth of the bytes of declared keys).
The prefix is the only declared key: it has the blocks' hash tag, so a cluster runs the script on their node.
"""

from __future__ import annotations

from services.kvstore.index.holder_table import (
    HOLDER_ID_BYTES,
    HOLDERS_KEY,
    PROGRESS_KEY,
    RETIRED_KEY,
    SEEN_KEY,
    VERSION_KEY,
)
from services.kvstore.resp.command import LuaScript
from shared.kv.hashing import HASH_BYTES

SUPERSEDED, RESYNC, STALE, UNKNOWN = -1, -2, -3, -4
"""Error results of ADMIT, explained there."""

TABLE_KEYS = (VERSION_KEY, HOLDERS_KEY, PROGRESS_KEY, SEEN_KEY, RETIRED_KEY)
"""KEYS of the scripts about the table."""

_TABLE = """
local VERSION, HOLDERS, PROGRESS, SEEN, RETIRED = unpack(KEYS)

local function changed(new_epoch)
  local version = redis.call('GET', VERSION) or new_epoch .. struct.pack('<I8', 0)
  local changes = struct.unpack('<I8', string.sub(version, 9)) + 1
  redis.call('SET', VERSION, string.sub(version, 1, 8) .. struct.pack('<I8', changes))
end

local function forget(holder)
  redis.call('HDEL', HOLDERS, holder)
  redis.call('HDEL', PROGRESS, holder)
  redis.call('ZREM', SEEN, holder)
  redis.call('HINCRBY', HOLDERS, 'dead', 1)
end
"""

_ADMIT = """
local tier, name, incarnation, role, can_register, new_epoch, first_id = unpack(ARGV)
local sequence, acknowledged, reset = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10] == '1'
local retired_max_age_s = tonumber(ARGV[11])
local holder, now = tier .. name, tonumber(redis.call('TIME')[1])
local entry = redis.call('HGET', HOLDERS, holder)
local id
if entry and string.sub(entry, 1, 8) == incarnation then
  if sequence > 0 then
    local done = tonumber(redis.call('HGET', PROGRESS, holder) or '0')
    if sequence <= done then return -3 end
    if not reset and done < acknowledged then return -2 end
  end
  if reset then
    redis.call('HINCRBY', HOLDERS, 'dead', 1)
  else
    id = string.sub(entry, 9, 12)
  end
else
  if redis.call('ZSCORE', RETIRED, incarnation .. name) then return -1 end
  if sequence > 0 and not reset then return -2 end
  if can_register ~= '1' then return -4 end
  for other_tier = 1, 3 do
    local other = string.char(other_tier) .. name
    local theirs = redis.call('HGET', HOLDERS, other)
    if theirs and string.sub(theirs, 1, 8) ~= incarnation then
      forget(other)
      redis.call('ZADD', RETIRED, now, string.sub(theirs, 1, 8) .. name)
    end
  end
  redis.call('ZREMRANGEBYSCORE', RETIRED, '-inf', now - retired_max_age_s)
end
if not id then
  redis.call('HSETNX', HOLDERS, 'next', first_id)
  id = struct.pack('<I4', redis.call('HINCRBY', HOLDERS, 'next', 1) % 4294967296)
end
if can_register ~= '1' then role = string.sub(entry, 13) end
local value = incarnation .. id .. role
if value ~= entry then
  redis.call('HSET', HOLDERS, holder, value)
  changed(new_epoch)
end
if sequence > 0 then redis.call('HSET', PROGRESS, holder, sequence) end
redis.call('ZADD', SEEN, now, holder)
return id
"""

_READ_TABLE = """
return {redis.call('GET', VERSION), redis.call('HGETALL', HOLDERS)}
"""

_EXPIRE = """
local silent = redis.call('ZRANGEBYSCORE', SEEN, '-inf', tonumber(redis.call('TIME')[1]) - tonumber(ARGV[1]))
for _, holder in ipairs(silent) do forget(holder) end
if #silent > 0 then changed('') end
return #silent
"""

_FORGET_ALL = """
local version = redis.call('GET', VERSION)
if not version or string.sub(version, 1, 8) ~= ARGV[1] then return 0 end
local fields = redis.call('HKEYS', HOLDERS)
for _, field in ipairs(fields) do
  if field ~= 'next' and field ~= 'dead' then forget(field) end
end
changed('')
return 1
"""

_BLOCKS = f"""
local HASH, RECORD, GROUP = {HASH_BYTES}, {HOLDER_ID_BYTES}, 256

local function position(value, record)
  local from = 1
  while true do
    local at = string.find(value, record, from, true)
    if not at or (at - 1) % RECORD == 0 then return at end
    from = at + 1
  end
end

local function each_group(visit)
  local prefix, hashes = KEYS[1], ARGV[1]
  for first = 1, #hashes, HASH * GROUP do
    local keys = {{}}
    for at = first, math.min(first + HASH * GROUP, #hashes + 1) - 1, HASH do
      keys[#keys + 1] = prefix .. string.sub(hashes, at, at + HASH - 1)
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
local record, added = ARGV[2], 0
each_group(function(keys, values)
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
local removed = 0
each_group(function(keys, values)
  local writes, deletes = {}, {}
  for i, key in ipairs(keys) do
    local before = values[i] or ''
    local value = before
    for r = 2, #ARGV do
      local at = position(value, ARGV[r])
      if at then value = string.sub(value, 1, at - 1) .. string.sub(value, at + RECORD) end
    end
    if value ~= before then
      removed = removed + (#before - #value) / RECORD
      if value == '' then
        deletes[#deletes + 1] = key
      else
        writes[#writes + 1] = key
        writes[#writes + 1] = value
      end
    end
  end
  store(writes, deletes)
end)
return removed
"""

ADMIT = LuaScript(_TABLE + _ADMIT)
"""Checks whether a holder may write, and returns its id. KEYS: TABLE_KEYS.

(tier, name, incarnation, role, 1 to register an unknown holder, epoch and first id for a new index, sequence number of
the change or 0, last acknowledged one, 1 to start over, seconds for which superseded incarnations are remembered)
-> the id (4 bytes), or

    SUPERSEDED  a newer incarnation of the name has registered
    RESYNC      acknowledged changes are lost, perhaps the whole index: the holder must start over
    STALE       a later change was applied already: this one arrived late
    UNKNOWN     not registered, and the call does not register
"""

READ_TABLE = LuaScript(_TABLE + _READ_TABLE)
"""() -> version and fields of the table, read atomically. KEYS: TABLE_KEYS."""

EXPIRE = LuaScript(_TABLE + _EXPIRE)
"""(seconds) -> number of holders forgotten because they were silent for that long. KEYS: TABLE_KEYS."""

FORGET_ALL = LuaScript(_TABLE + _FORGET_ALL)
"""(epoch) -> 1 when all holders were forgotten, 0 for another epoch. KEYS: TABLE_KEYS."""

PUBLISH = LuaScript(_BLOCKS + _PUBLISH)
"""(hashes, id) -> records added. Publishing again adds nothing. KEYS: the blocks' prefix."""

REMOVE = LuaScript(_BLOCKS + _REMOVE)
"""(hashes, id…) -> records removed. A block without holders loses its key. KEYS: the blocks' prefix."""
