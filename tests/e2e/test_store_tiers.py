"""Prefixes from the store's tiers: real workers, UCX between processes, a real index."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import ClusterSpec
from services.router.dispatcher import DispatchConfig, Dispatcher
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.views import Pool
from services.router.prefix_lookup import PrefixLookup
from services.router.request import Request
from shared.engine.sampling_params import SamplingParams
from shared.kv.hashing import chain
from shared.rpc.block_holders import WorkerRole
from shared.rpc.kvstore_client import KVStoreClient
from shared.rpc.store_client import StoreClient
from tests.e2e.running import BLOCK_SIZE, DEADLINE_S, DEMO

pytestmark = pytest.mark.slow

HOST_BYTES = 1 << 26


class Recording(TandemCommands):
    """Remembers who was started where."""

    def router(self, workers, kvstore):
        self.workers, self.kvstore_address = workers, kvstore
        return super().router(workers, kvstore)


class Chosen(Placement):
    """Sends every prompt to the prefill worker that the test names, where it names one."""

    prefill = ""

    def choose(self, need, decodes, prefills, *, collocated):
        named = Pool()
        for view in prefills:
            if self.prefill in ("", view.name):
                named.add(view)
        return super().choose(need, decodes, named, collocated=collocated)


class Stage:
    """A cluster, and a router within the test, so that the test says where prompts go."""

    def __init__(self, cluster: LocalCluster, commands: Recording) -> None:
        self.cluster = cluster
        self.placement = Chosen(PlacementConfig())
        self.fleet = Fleet("test", commands.workers["prefill"], commands.workers["decode"], self._on_change)
        self.index = KVStoreClient(commands.kvstore_address, match_timeout_s=5.0)
        self.store = StoreClient(commands.kvstore_address, look_up_timeout_s=5.0)
        lookup = PrefixLookup(self.index, self.fleet)
        self.metrics = RouterMetrics("demo")
        self.dispatcher = Dispatcher(
            self.fleet,
            self.placement,
            lookup,
            self.metrics,
            DispatchConfig(collocated=cluster.spec.mode == "collocated"),
        )

    async def start(self) -> None:
        self.fleet.start()
        await self.until(lambda: all(link.connected for link in self.fleet.links))

    async def close(self) -> None:
        await self.fleet.close()
        await self.store.close()
        await self.index.close()
        self.metrics.close()

    async def ask(self, prompt, prefill="", tenant="t", **sampling):
        """Output tokens and summary of a greedy answer."""
        self.placement.prefill = prefill
        params = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 24, "ignore_eos": True, **sampling})
        running = self.dispatcher.submit(
            Request(uuid.uuid4().hex, tuple(prompt), params, tenant, arrived_at=time.perf_counter())
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                return [token async for delta in running for token in delta.token_ids], running.summary
        finally:
            await running.aclose()

    async def stored(self, tokens, num_blocks: int, tenant="t") -> None:
        """Waits until the index says that the store has so many blocks of these tokens."""
        hashes = chain(self.fleet.hash_root(tenant), tokens, BLOCK_SIZE)[:num_blocks]
        assert len(hashes) == num_blocks
        async with asyncio.timeout(DEADLINE_S):
            while True:
                blocks = (await self.index.match(hashes)).blocks if hashes else ()
                by_store = [any(holder.role is WorkerRole.STORE for holder in holders) for holders in blocks]
                if by_store == [True] * num_blocks:
                    return
                await asyncio.sleep(0.02)

    async def num_bad(self) -> int:
        return sum(tier.num_bad for tier in await self.store.tier_stats())

    async def idle(self) -> None:
        """Waits until no pool has a used block: nothing that a store is sent, or sends, stays behind."""
        links = [link for link in self.fleet.links if link.connected]
        await self.until(lambda: all(link.load.num_free_blocks == link.load.num_total_blocks > 0 for link in links))

    def kill(self, name: str) -> None:
        os.kill(self.cluster.children[name].pid, signal.SIGKILL)

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.02)

    def _on_change(self) -> None:
        self.dispatcher.pump()


@contextlib.asynccontextmanager
async def staged(folder: Path, kind: type[Recording] = Recording, **spec) -> AsyncIterator[Stage]:
    wanted = ClusterSpec(
        model=DEMO, http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=folder,
        **{"num_kv_blocks": 256, "dtype": "fp32", "prefix_fetch": "always", **spec},
    )  # fmt: skip
    commands = kind(wanted)
    async with LocalCluster(wanted, commands=commands) as cluster:
        stage = Stage(cluster, commands)
        await stage.start()
        try:
            yield stage
        finally:
            await stage.close()


def prompt(num_tokens: int, seed: int = 37) -> list[int]:
    return [20 + (i * seed) % 2000 for i in range(num_tokens)]


async def test_six_turns_on_changing_workers_compute_their_new_tokens_alone(tmp_path):
    """And the last one after the worker of every earlier turn was killed."""
    async with staged(tmp_path, num_prefill=3, store_host_bytes=HOST_BYTES) as stage:
        tokens, known = prompt(70), 0
        for turn in range(6):
            if turn == 5:
                stage.kill("prefill-0")
                stage.kill("prefill-1")
                await stage.until(lambda: sum(link.connected for link in stage.fleet.links) == 2)
            expected, alone = await stage.ask(tokens, "prefill-2", tenant=f"alone-{turn}")
            assert alone.num_cached_tokens == 0
            await stage.stored(tokens, known // BLOCK_SIZE)
            answer, summary = await stage.ask(tokens, f"prefill-{turn % 3}")
            assert answer == expected
            assert summary.prefill_worker == f"prefill-{turn % 3}"
            assert summary.num_cached_tokens == known
            assert summary.ttft.prefix_fetch_ms > 0
            known = (len(tokens) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            tokens = [*tokens, *answer, *prompt(21, seed=41 + turn)]


async def test_flipped_bits_on_disk_are_computed_again_and_nothing_else(tmp_path):
    folder = tmp_path / "blocks"
    spec = {"num_prefill": 2, "store_disk_folder": folder, "store_disk_bytes": HOST_BYTES}
    async with staged(tmp_path, **spec) as stage:
        tokens = prompt(200)
        expected, _ = await stage.ask(tokens, "prefill-0")
        await stage.stored(tokens, 12)
        names = chain(stage.fleet.hash_root("t"), tokens, BLOCK_SIZE)
        for index in (3, 9):
            path = folder / names[index].hex()[:2] / f"{names[index].hex()}.kv"
            content = bytearray(path.read_bytes())
            content[-100] ^= 16
            path.write_bytes(content)
        answer, summary = await stage.ask(tokens, "prefill-1")
        assert answer == expected
        assert summary.num_cached_tokens == (12 - 2) * BLOCK_SIZE
        assert await stage.num_bad() == 2
        await stage.idle()


async def test_a_prompt_comes_back_after_every_pool_was_flooded(tmp_path):
    """Collocated: the workers that decode also fetch."""
    spec = {"mode": "collocated", "num_prefill": 0, "num_decode": 2, "num_kv_blocks": 64}
    async with staged(tmp_path, store_host_bytes=HOST_BYTES, **spec) as stage:
        tokens = prompt(330)
        expected, _ = await stage.ask(tokens)
        await stage.stored(tokens, 20)
        first = chain(stage.fleet.hash_root("t"), tokens, BLOCK_SIZE)[:1]
        flood = 41
        while any(holder.role is not WorkerRole.STORE for holder in (await stage.index.match(first)).blocks[0]):
            await stage.ask(prompt(600, seed=(flood := flood + 2)), max_tokens=1)
        answer, summary = await stage.ask(tokens)
        assert answer == expected
        assert summary.num_cached_tokens == summary.num_fetched_tokens == 20 * BLOCK_SIZE
        await stage.idle()


class Slow(Recording):
    """The store sends so slowly that computing is about as fast."""

    def kvstore(self, bind, redis_url):
        return [*super().kvstore(bind, redis_url), "--send-bytes-per-s", "4000000"]


async def test_what_a_slow_link_has_not_brought_in_time_is_computed_from_the_front(tmp_path):
    spec = {"num_prefill": 2, "store_host_bytes": HOST_BYTES, "prefix_fetch": "auto"}
    async with staged(tmp_path, Slow, **spec) as stage:
        tokens = prompt(480)
        expected, _ = await stage.ask(tokens, "prefill-0")
        await stage.stored(tokens, 30)
        answer, summary = await stage.ask(tokens, "prefill-1")
        assert answer == expected
        assert 0 < summary.num_cached_tokens < 29 * BLOCK_SIZE
        assert summary.num_cached_tokens % BLOCK_SIZE == 0
        assert 0 < summary.ttft.prefix_fetch_ms < summary.ttft.ttft_ms
        await stage.idle()


async def test_a_store_killed_under_load_costs_no_request(tmp_path):
    async with staged(tmp_path, num_prefill=2, store_host_bytes=HOST_BYTES, prefix_fetch="auto") as stage:
        prompts = [prompt(100, seed=37 + 2 * (i % 3)) for i in range(24)]
        expected = [(await stage.ask(tokens, "prefill-0"))[0] for tokens in prompts[:3]]
        gate = asyncio.Semaphore(6)
        done = 0

        async def ask(number: int) -> list[int]:
            nonlocal done
            async with gate:
                answer, _ = await stage.ask(prompts[number])
            done += 1
            return answer

        asking = [asyncio.create_task(ask(i)) for i in range(len(prompts))]
        await stage.until(lambda: done >= 4)
        stage.kill("kvstore")
        assert await asyncio.gather(*asking) == [expected[i % 3] for i in range(len(prompts))]
        again, _ = await stage.ask(prompt(150))
        assert again[:1]
        await stage.idle()
