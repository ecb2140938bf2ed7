"""A whole cluster of real processes under random input, with two ordinary streams through it that are checked token by
token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.chaos.adapters import write_adapters
from loadtest.chaos.cluster import WHOLE_TIMEOUT_S, ChaosCluster, chaos_cluster
from loadtest.chaos.streams import ask, prompts, undisturbed
from shared.telemetry.loop_lag import WINDOW_S
from tests.e2e.running import DEMO
from tests.fuzz.adapter_campaign import fuzz_adapters
from tests.fuzz.campaign import Findings, fuzz_grpc, fuzz_http, fuzz_wire
from tests.fuzz.service_campaign import BLOCKS, RECORDS, fuzz_calls, fuzz_sessions
from tests.waiting import DEADLINE_S

NUM_STREAMS = 2
LOOK_S = 10.0
"""Between two looks at the processes' pages; a loop's largest lag stays on them for longer."""


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """A router's ports, as the campaigns take them."""

    http: str
    grpc: str


@dataclass(frozen=True, slots=True)
class PartTarget:
    """A worker's or store node's port."""

    address: str
    pid: int

    @property
    def alive(self) -> bool:
        """Whether the process that was found here still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return True
        return False


@dataclass(slots=True)
class LoopLags:
    """The largest of each process, milliseconds, as it measured them itself."""

    clock_ms: dict[str, float] = field(default_factory=dict)
    computing_ms: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, page: str) -> None:
        """Takes one metrics page."""
        for family in text_string_to_metric_families(page):
            for sample in family.samples if family.name == "tandem_event_loop_lag_seconds" else ():
                kept = self.clock_ms if sample.labels["by"] == "clock" else self.computing_ms
                kept[name] = max(kept.get(name, 0.0), 1e3 * sample.value)


async def fuzz_cluster(counts: Mapping[str, int], found: Findings, folder: Path) -> LoopLags:
    """The cases of each kind against one cluster: what clients send to its first router, sessions and block messages to
    its workers. Adds to the findings where a stream is lost or wrong, and where the cluster is not as it was: a process
    that ended, a part that is missing, a block that is held."""
    adapters = Path(os.path.abspath(folder / "adapters" / "allowed"))  # noqa: ASYNC240  # nothing is looked up
    shutil.rmtree(adapters.parent, ignore_errors=True)  # of the run before
    write_adapters(DEMO, adapters)
    async with chaos_cluster(DEMO, folder, adapters=adapters) as cluster:
        if await cluster.until_whole() is None:
            raise TimeoutError(f"the cluster was not whole within {WHOLE_TIMEOUT_S:g} s")
        pids = {name: child.pid for name, child in cluster.local.children.items()}
        lags = LoopLags()
        async with _watched(cluster, lags), _ordinary_streams(cluster, found):
            await asyncio.sleep(2 * WINDOW_S)  # for so long the pages show what the start cost
            lags.clock_ms.clear()
            lags.computing_ms.clear()
            await asyncio.to_thread(_campaign, await _targets(cluster), adapters, counts, found)
        if {name: child.pid for name, child in cluster.local.children.items()} != pids:
            found.failed("the cluster", "a process ended and was started again")
        if await cluster.until_whole() is None:
            found.failed("the cluster", "it is not whole")
        if await cluster.num_leaked():
            found.failed("the cluster", "blocks are held, or requests counted, that no client waits for")
        return lags


async def _targets(cluster: ChaosCluster) -> tuple[RouterTarget, dict[str, PartTarget]]:
    status = await cluster.until_whole()
    assert status is not None
    router = cluster.local.routers[0]
    parts = {
        worker.worker.name: PartTarget(worker.address, cluster.pid(worker.worker.name)) for worker in status.workers
    }
    address = next(iter(cluster.local.stores.values()))
    parts["records"] = PartTarget(address, cluster.pid("kvstore"))
    return RouterTarget(router.http, router.grpc), parts


def _campaign(
    targets: tuple[RouterTarget, Mapping[str, PartTarget]],
    adapters: Path,
    counts: Mapping[str, int],
    found: Findings,
) -> None:
    router, parts = targets
    fuzz_adapters(router, adapters, DEMO, counts["adapters"], found)
    fuzz_http(router, counts["http"], found)
    fuzz_wire(router, counts["wire"], found)
    if counts.get("schema"):
        from tests.fuzz.schema_campaign import fuzz_schema  # it takes a second to import

        fuzz_schema(router, counts["schema"], found)
    fuzz_grpc(router, counts["grpc"], found)
    for role in ("prefill", "decode"):
        # A Drain is obeyed, as it should be: on a cluster that is to go on answering it is left out.
        fuzz_sessions(parts[f"{role}-0"], role, counts["services"] // 4, found, spared=("drain",))
        fuzz_calls(parts[f"{role}-0"], BLOCKS, counts["services"] // 4, found)
    fuzz_calls(parts["records"], RECORDS, counts["services"] // 4, found)


@contextlib.asynccontextmanager
async def _ordinary_streams(cluster: ChaosCluster, found: Findings) -> AsyncIterator[None]:
    """Two streams, one after another each, whose tokens are those of an undisturbed run."""
    texts = prompts(NUM_STREAMS)
    calm = await undisturbed(cluster.targets, texts, "calm")
    stop = asyncio.Event()

    async def keep_asking(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            (answer,) = await ask(cluster.targets, [texts[number]], f"{number}-{turn}", resuming=False)
            if answer.error or answer.tokens != calm[number].tokens:
                found.failed(f"stream {number}-{turn}", answer.error or "another answer than undisturbed")
            else:
                found.num_streams += 1

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(keep_asking(number))
        try:
            yield
        finally:
            stop.set()


@contextlib.asynccontextmanager
async def _watched(cluster: ChaosCluster, lags: LoopLags) -> AsyncIterator[None]:
    """Looks at every process's page now and then, and once more at the end."""
    # A connection for each look: one that is kept may be closed just as it is used.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=DEADLINE_S, verify=False, limits=limits) as client:

        async def look() -> None:
            for name, address in cluster.local.metrics.items():
                lags.add(name, (await client.get(f"http://{address}/metrics")).text)

        async def go_on() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                await look()

        watching = asyncio.create_task(go_on())
        try:
            yield
            await look()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
