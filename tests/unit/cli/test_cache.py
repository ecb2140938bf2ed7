"""`tandem cache` against a scripted router: what it asks, what it shows, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from shared.errors import InvalidRequest, TandemError
from shared.rpc.errors import ERROR_TRAILER, to_proto
from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc, kvstore_pb2
from tests.unit.cli.conftest import RunTandem


def some_stats() -> cache_pb2.CacheStats:
    """A node with two tiers, of which the disk fails, and one that does not answer."""
    tiers = kvstore_pb2.TierStatsList(
        node_name="store-0",
        tiers=[
            kvstore_pb2.TierStats(
                tier=kvstore_pb2.TIER_HOST, used_bytes=3 << 20, budget_bytes=4 << 20, num_blocks=3, num_hits=17,
                num_stored=9, num_evicted=6, pinned_bytes=1 << 20, pin_budget_bytes=1 << 20,
            ),
            kvstore_pb2.TierStats(
                tier=kvstore_pb2.TIER_DISK, budget_bytes=1 << 30, num_bad=2, failure="[Errno 28] No space left"
            ),
        ],
        tenants=[
            kvstore_pb2.TenantUse(
                tenant="acme", tier=kvstore_pb2.TIER_HOST, used_bytes=2 << 20, quota_bytes=2 << 20, num_blocks=2,
                num_hits=11, num_evicted=5,
            ),
            kvstore_pb2.TenantUse(tenant="unnamed", tier=kvstore_pb2.TIER_HOST, used_bytes=1 << 20, num_blocks=1),
        ],
        pins=[
            kvstore_pb2.PinStatus(
                name="system", tenant="acme", num_blocks=4, num_held=1, tiers=[kvstore_pb2.TIER_HOST]
            )
        ],
    )  # fmt: skip
    return cache_pb2.CacheStats(
        index=kvstore_pb2.StoreStats(
            num_blocks=12, num_match_requests=5, num_match_blocks=20, num_hit_blocks=10, index_bytes=2048,
            index_address="unix:///v.sock",
        ),
        nodes=[
            cache_pb2.StoreNodeStats(address="127.0.0.1:1", stats=tiers),
            cache_pb2.StoreNodeStats(address="127.0.0.1:2", failure="it does not answer"),
        ],
        tenants=[
            cache_pb2.TenantTokens(
                tenant="acme", num_requests=3, num_prompt_tokens=100, num_local_tokens=20, num_peer_tokens=5,
                num_store_tokens=25,
            )
        ],
    )  # fmt: skip


@dataclass
class ScriptedCache(cache_pb2_grpc.CacheServiceServicer):
    """Answers by script; keeps what it was asked."""

    stats: cache_pb2.CacheStats = field(default_factory=some_stats)
    flushed: cache_pb2.FlushCacheResponse = field(default_factory=cache_pb2.FlushCacheResponse)
    pinned: cache_pb2.PinPrefixResponse = field(default_factory=cache_pb2.PinPrefixResponse)
    error: TandemError | None = None
    asked: list[object] = field(default_factory=list)
    target: str = ""

    def __post_init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def GetCacheStats(  # noqa: N802
        self, request: cache_pb2.GetCacheStatsRequest, context: grpc.ServicerContext
    ) -> cache_pb2.CacheStats:
        self._note(request, context)
        return self.stats

    def FlushCache(  # noqa: N802
        self, request: cache_pb2.FlushCacheRequest, context: grpc.ServicerContext
    ) -> cache_pb2.FlushCacheResponse:
        self._note(request, context)
        return self.flushed

    def PinPrefix(  # noqa: N802
        self, request: cache_pb2.PinPrefixRequest, context: grpc.ServicerContext
    ) -> cache_pb2.PinPrefixResponse:
        self._note(request, context)
        return self.pinned

    def UnpinPrefix(  # noqa: N802
        self, request: cache_pb2.UnpinPrefixRequest, context: grpc.ServicerContext
    ) -> cache_pb2.UnpinPrefixResponse:
        self._note(request, context)
        return cache_pb2.UnpinPrefixResponse()

    def _note(self, request: object, context: grpc.ServicerContext) -> None:
        self.asked.append(request)
        if self.error is not None:
            context.set_trailing_metadata(((ERROR_TRAILER, to_proto(self.error).SerializeToString()),))
            context.abort(getattr(grpc.StatusCode, self.error.grpc_code), self.error.message)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tandem: RunTandem) -> Iterator[ScriptedCache]:
    scripted = ScriptedCache()
    monkeypatch.setenv("TANDEM_TARGET", scripted.target)
    monkeypatch.setenv("COLUMNS", "240")
    yield scripted
    scripted.close()


def test_stats_show_tiers_tenants_pins_and_what_fails(tandem: RunTandem, cache: ScriptedCache) -> None:
    result = tandem("cache", "stats")
    assert result.status == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == "index: 12 blocks in 2.0 KiB at unix:///v.sock; 5 lookups, 50 % of 20 blocks found"
    assert "store node 127.0.0.1:2 does not answer: it does not answer" in lines
    assert "store node store-0, disk tier: [Errno 28] No space left" in lines
    assert "store-0 host 3.0 MiB 4.0 MiB 75 % 3 17 9 6 0 0 1.0 MiB of 1.0 MiB 0 B 0" in lines
    assert "acme 3 100 50 % 20 % 5 % 25 % 2.0 MiB of 2.0 MiB - 2 11 5" in lines
    assert "unnamed - - - - - - 1.0 MiB - 1 0 0" in lines
    assert "system acme host 4 1" in lines


def test_names_are_shown_as_they_are(tandem: RunTandem, cache: ScriptedCache) -> None:
    stats = cache.stats.nodes[0].stats
    stats.node_name, stats.tenants[0].tenant, stats.pins[0].name = "[fd00::1]:50052", "[/b]", "[/INST] Sure"
    lines = [" ".join(line.split()) for line in tandem("cache", "stats").out.splitlines()]
    assert "[fd00::1]:50052 host 3.0 MiB 4.0 MiB 75 % 3 17 9 6 0 0 1.0 MiB of 1.0 MiB 0 B 0" in lines
    assert "[/b] - - - - - - 2.0 MiB of 2.0 MiB - 2 11 5" in lines
    assert "[/INST] Sure acme host 4 1" in lines


def test_stats_as_json_hold_everything(tandem: RunTandem, cache: ScriptedCache) -> None:
    told = json.loads(tandem("cache", "stats", "--json").out)
    assert told["nodes"][0]["stats"]["tiers"][1]["failure"] == "[Errno 28] No space left"
    assert told["tenants"][0]["num_store_tokens"] == "25"


@pytest.mark.parametrize(("answer", "status", "asked"), [("n\n", 1, 0), ("y\n", 0, 1), ("", 1, 0)])
def test_a_flush_asks_first(tandem: RunTandem, cache: ScriptedCache, answer: str, status: int, asked: int) -> None:
    result = tandem("cache", "flush", stdin=answer)
    assert (result.status, len(cache.asked)) == (status, asked)
    assert "Drop all tenants' blocks" in result.err


def test_a_flush_tells_what_was_dropped_and_fails_with_a_node(tandem: RunTandem, cache: ScriptedCache) -> None:
    cache.flushed.nodes.add(address="127.0.0.1:1", flushed=kvstore_pb2.FlushResponse(num_blocks=2, num_bytes=2048))
    result = tandem("cache", "flush", "--tenant", "acme", "-y")
    assert (result.status, result.out) == (0, "127.0.0.1:1: 2 blocks, 2.0 KiB dropped\n")
    assert cache.asked == [cache_pb2.FlushCacheRequest(tenant="acme")]
    cache.flushed.nodes.add(address="127.0.0.1:2", failure="it does not answer")
    assert tandem("cache", "flush", "-y").status == 1


def test_a_prefix_may_be_a_message_a_system_message_text_ids_or_a_file(
    tandem: RunTandem, cache: ScriptedCache, tmp_path: Path
) -> None:
    path = tmp_path / "prefix.txt"
    path.write_text("You are\nkind.")
    for arguments in (["hi"], ["hi", "--system"], ["hi", "--raw"], ["1,2", "--token-ids"], [f"@{path}", "--system"]):
        assert tandem("cache", "pin", *arguments).status == 0
    kinds = [request.WhichOneof("prefix") for request in cache.asked]  # type: ignore[attr-defined]
    assert kinds == ["chat", "system", "text", "tokens", "system"]
    last = cache.asked[-1]
    assert isinstance(last, cache_pb2.PinPrefixRequest)
    assert (last.name, last.system, last.tenant) == ("You are kind.", "You are\nkind.", "default")


def test_what_cannot_be_pinned_is_said_in_a_line(tandem: RunTandem, cache: ScriptedCache) -> None:
    result = tandem("cache", "pin", "@/nowhere/prefix")
    assert (result.status, "cannot be read from /nowhere/prefix" in result.err) == (2, True)
    assert tandem("cache", "pin", "x", "--raw", "--system").status == 2
    result = tandem("cache", "pin", "5000000000", "--token-ids")
    assert (result.status, "below 2**32, got '5000000000'" in result.err) == (2, True)
    cache.error = InvalidRequest("the prefix takes 9 bytes, more than pins leave", field="prefix")
    result = tandem("cache", "pin", "x")
    assert (result.status, result.err) == (2, "tandem: the prefix takes 9 bytes, more than pins leave\n")
