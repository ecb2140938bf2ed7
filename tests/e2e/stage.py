"""A cluster whose router lies within the test, so that the test says where prompts go and what they may be had from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec, RouterPlace
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.request import Request
from services.router.dispatch.waiting_room import DispatchConfig
from services.router.placement.policy import Placement, PlacementConfig
from services.router.placement.views import Pool
from services.router.workers.discovery import StaticDiscovery
from services.router.workers.fleet import Fleet
from services.router.workers.liveness import LivenessLimits
from shared.block_service.store_client import StoreClient
from shared.engine.sampling_params import SamplingParams
from shared.errors import StoreUnavailable
from shared.identity import WorkerRole
from shared.kv.hashing import chain
from shared.kv_index.client import KVStoreClient
from tests.e2e.patient import patient_pings
from tests.e2e.running import BLOCK_SIZE, DEMO, PatientCommands
from tests.fork_server import forked_services
from tests.unit.router.reading import deltas
from tests.waiting import DEADLINE_S, until

HOST_BYTES = 1 << 26


class Headless(LocalCluster):
    """Starts no router: the test's own is the only one. It remembers where everything is."""

    async def _start_routers(self, routers: Sequence[RouterPlace], kvstore: str) -> None:
        self.kvstore_address = kvstore
        self.workers: dict[WorkerRole, dict[str, str]] = {WorkerRole.PREFILL: {}, WorkerRole.DECODE: {}}
        for plan in self._workers:
            self.workers[plan.role][plan.name] = plan.address


class Chosen(Placement):
    """Sends every prompt to the workers that the test names, where it names any."""

    prefill = decode = ""

    def choose(self, need, decodes, prefills, *, collocated):
        return super().choose(need, _named(decodes, self.decode), _named(prefills, self.prefill), collocated=collocated)

    def choose_pair(self, need, decodes, prefills):
        if self.prefill or self.decode:
            return self.choose(need, decodes, prefills, collocated=False)
        return super().choose_pair(need, decodes, prefills)


def _named(pool: Pool, name: str) -> Pool:
    named = Pool()
    for view in pool:
        if name in ("", view.name):
            named.add(view)
    return named


class Lookup(PrefixLookup):
    """Names those peers alone that the test does."""

    peers: frozenset[str] | None = frozenset()
    """None: all of them."""

    async def hits(self, token_ids, salt, num_prompt_tokens, traceparent="", adapter=""):
        hits = await super().hits(token_ids, salt, num_prompt_tokens, traceparent, adapter)
        named = tuple(peer for peer in hits.peers if self.peers is None or peer.name in self.peers)
        return replace(hits, peers=named)


class Stage:
    """A cluster, and a router within the test, so that the test says where prompts go."""

    def __init__(self, cluster: Headless, placement: Chosen) -> None:
        self.cluster = cluster
        self.placement = placement
        mode, workers = cluster.spec.mode, cluster.workers
        self.fleet = Fleet(
            "test",
            StaticDiscovery.of(workers["decode" if mode == "auto" else "prefill"], workers["decode"]),
            self._on_change,
            collocated=mode == "collocated",
            # A worker on a busy machine is not lost; one that is killed ends its stream at once.
            limits=LivenessLimits(give_up_after_s=60.0),
        )
        self.index = KVStoreClient(cluster.kvstore_address, match_timeout_s=5.0)
        self.store = StoreClient(cluster.kvstore_address, look_up_timeout_s=5.0)
        self.lookup = Lookup(self.index, self.fleet)
        self.dispatcher = Dispatcher(
            self.fleet,
            self.placement,
            self.lookup,
            DispatchConfig(mode=mode),
        )

    async def start(self) -> None:
        self.fleet.start()
        await self.until(lambda: all(link.connected for link in self.fleet.links))

    async def close(self) -> None:
        await self.fleet.close()
        await self.store.close()
        await self.index.close()

    async def ask(self, prompt, prefill="", tenant="t", **sampling):
        """Output tokens and record of a greedy answer."""
        self.placement.prefill = prefill
        params = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 24, "ignore_eos": True, **sampling})
        running = self.dispatcher.submit(
            Request(uuid.uuid4().hex, tuple(prompt), params, tenant, arrived_at=time.perf_counter())
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                return [token async for delta in deltas(running) for token in delta.token_ids], running.record
        finally:
            await running.aclose()

    async def held(self, tokens, num_blocks: int, names=(), tenant="t") -> None:
        """Waits until the index says that each of these workers has that number of blocks of these tokens."""
        hashes = chain(self.fleet.hash_root(tenant, len(tokens)), tokens, BLOCK_SIZE)[:num_blocks]

        async def are_held() -> bool:
            blocks = await self._holders(hashes)
            by_block = [{holder.worker_name for holder in holders} for holders in blocks]
            return len(blocks) == num_blocks and all(held.issuperset(names) for held in by_block)

        await until(are_held)

    async def stored(self, tokens, num_blocks: int, tenant="t", deadline_s: float = DEADLINE_S) -> None:
        """Waits until the index says that the store has that number of blocks of these tokens; of KV groups with
        windows, what is seen behind them."""
        assert self.fleet.layout is not None
        groups = self.fleet.layout.groups
        names = chain(self.fleet.hash_root(tenant, len(tokens)), tokens, BLOCK_SIZE, groups.size)
        hashes = [names[place] for place in groups.seen_behind(num_blocks)]

        async def are_stored() -> bool:
            blocks = await self._holders(hashes)
            by_store = [any(holder.role is WorkerRole.STORE for holder in holders) for holders in blocks]
            return by_store == [True] * len(hashes)

        await until(are_stored, deadline_s)

    async def pooled(self, tokens, tenant="t") -> bool:
        """Whether any worker's pool has any block of these tokens, as the index has it: the last ones may outlive the
        first."""
        hashes = chain(self.fleet.hash_root(tenant, len(tokens)), tokens, BLOCK_SIZE)
        blocks = await self._holders(hashes)
        return any(holder.role is not WorkerRole.STORE for holders in blocks for holder in holders)

    async def _holders(self, hashes):
        """Who has each of these blocks, as the index says once it answers."""

        async def match():
            with contextlib.suppress(StoreUnavailable):
                return await self.index.match(hashes)

        return (await until(match)).blocks if hashes else ()

    async def num_bad(self) -> int:
        return sum(tier.num_bad for tier in (await self.store.stats()).tiers)

    async def idle(self) -> None:
        """Waits until no pool has a used block: nothing that a store is sent, or sends, stays behind."""
        links = [link for link in self.fleet.links if link.connected]
        await self.until(lambda: all(link.load.num_free_blocks == link.load.num_total_blocks > 0 for link in links))

    def load(self, name: str):
        """A worker's last report."""
        return next(link.load for link in self.fleet.links if link.name == name)

    def kill(self, name: str) -> None:
        os.kill(self.cluster.children[name].pid, signal.SIGKILL)

    async def until(self, condition) -> None:
        await until(condition)

    def _on_change(self) -> None:
        self.dispatcher.pump()


@contextlib.asynccontextmanager
async def staged(
    folder: Path, kind: type[PatientCommands] = PatientCommands, placement: Chosen | None = None, **spec
) -> AsyncIterator[Stage]:
    wanted = ClusterSpec(
        http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=folder,
        **{"model": DEMO, "num_kv_blocks": 256, "dtype": "fp32", "prefix_fetch": "always", **spec},
    )  # fmt: skip
    with patient_pings():
        async with forked_services(), Headless(wanted, commands=kind(wanted)) as cluster:
            stage = Stage(cluster, placement or Chosen(PlacementConfig()))
            await stage.start()
            try:
                yield stage
            finally:
                await stage.close()


def prompt(num_tokens: int, seed: int = 37) -> list[int]:
    return [20 + (i * seed) % 2000 for i in range(num_tokens)]
