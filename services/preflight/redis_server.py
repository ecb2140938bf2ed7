"""Redis or Valkey: does it answer, is it one that the index can use, and how far is its clock from ours."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from services.kvstore.resp.client import RedisClient, info_fields, replies_of
from services.kvstore.resp.command import Command
from services.kvstore.resp.open import redis_client
from services.kvstore.resp.redis_node import RedisConnection, RedisNode
from services.preflight.clock import check_skew
from services.preflight.finding import Finding, fail, ok, warn, worst
from shared.errors import ConfigError, StoreUnavailable

CHECK = "redis"
LEAST_VERSION = (5, 0)
"""The first version whose scripts may read the clock and write."""
ANSWER_TIMEOUT_S = 5.0
RETRY_S = 0.5
_REACH = (
    "see that the server runs, that redis_url names it, and that no NetworkPolicy or firewall stands between; from "
    "this Pod: getent hosts HOST"
)


@dataclass(frozen=True, slots=True)
class RedisNeed:
    """The server that a KV store would use."""

    url: str = field(repr=False)
    cluster: bool
    timeout_s: float
    """The KV store's `redis_timeout_s`."""
    password: str = field(default="", repr=False)
    """The KV store's `redis_password`."""


async def check_redis(need: RedisNeed, wait_s: float) -> list[Finding]:
    """Tries for `wait_s` seconds while nothing answers: a server that is installed beside us may come later."""
    deadline = time.monotonic() + wait_s
    try:
        while True:
            client = redis_client(need.url, ANSWER_TIMEOUT_S, cluster=need.cluster, password=need.password)
            try:
                return await _look(client, need)
            except StoreUnavailable as error:
                if time.monotonic() >= deadline:
                    return [fail(CHECK, error.message, _REACH)]
            finally:
                await client.close()
            await asyncio.sleep(RETRY_S)
    except ConfigError as error:
        return [fail(CHECK, error.message, "correct redis_url (redis.external.url and its Secret) or the server")]


async def _look(client: RedisClient, need: RedisNeed) -> list[Finding]:
    """Raises StoreUnavailable, and ConfigError for a server that cannot hold the index."""
    await client.check()
    nodes = await client.nodes()
    findings = [await _check_node(node, need.timeout_s) for node in nodes]
    skews = [check_skew(f"Redis at {node.endpoint}", *await _clock(node)) for node in nodes]
    return [worst(findings), worst(skews)]


async def _check_node(node: RedisNode, timeout_s: float) -> Finding:
    begin = time.monotonic()
    [info] = replies_of(node, await node.ask([Command.of("INFO", "server")], RedisConnection.READ))
    took_s = time.monotonic() - begin
    fields = info_fields(info)
    name, text = server_version(fields)
    version = tuple(int(part) for part in re.findall(r"\d+", fields.get("redis_version", "0"))[:2])
    shown = f"{name} {text} at {node.endpoint} answers in {1000 * took_s:.1f} ms"
    if version < LEAST_VERSION:
        return fail(CHECK, shown, f"Redis {'.'.join(map(str, LEAST_VERSION))} or newer, or any Valkey")
    if took_s > timeout_s:
        return warn(
            CHECK,
            f"{shown}, later than redis_timeout_s ({timeout_s:g} s)",
            "a server that is nearer, or a larger redis_timeout_s",
        )
    return ok(CHECK, shown)


def server_version(fields: dict[str, str]) -> tuple[str, str]:
    """("Valkey", "9.0.1") or ("Redis", "7.2.4") of INFO's fields; Valkey also calls itself Redis 7.2.4."""
    if "valkey_version" in fields:
        return "Valkey", fields["valkey_version"]
    return "Redis", fields.get("redis_version", "of unknown version")


async def _clock(node: RedisNode) -> tuple[float, float]:
    """(its clock minus ours, half of the time that asking took), seconds."""
    before = time.time()
    [reply] = replies_of(node, await node.ask([Command.of("TIME")], RedisConnection.READ))
    after = time.time()
    seconds, microseconds = reply
    return int(seconds) + int(microseconds) / 1e6 - (before + after) / 2, (after - before) / 2
