"""`python -m loadtest.bench adapters`: many adapters over the few slots of a fleet, beside one with slots for all.

Workers are timed devices behind a real router: adapters are real files, really read, copied and evicted, and steps take
STEP_TIMES. Both fleets get the same arrivals, in turns. In a last window one adapter that nobody has asked for becomes
half of the requests at once.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

import aiohttp
import torch
from prometheus_client.parser import text_string_to_metric_families

from loadtest.baseline.workloads import with_other_prompts
from loadtest.bench.batch_beside import timed_cluster
from loadtest.commands import measure_plan
from loadtest.config import LoadConfig, Traffic
from loadtest.metrics import goodput, request_metrics
from loadtest.records import RequestRecord
from loadtest.rig.command_line import Option, Out
from loadtest.rig.measure import percentile
from loadtest.rig.models import DEMO
from loadtest.rig.results import Report, Result, machine
from loadtest.run import plan_run
from loadtest.schedule import Limits, draw_adapters
from loadtest.simulator.adapter_study import assigned_loads
from loadtest.slo import Slo, parse_slo
from services.local.cluster import LocalCluster
from shared.errors import Internal
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.families.registry import load_config

RESIDENT, PRESSED = "all resident", "few slots"
HOT = "hot"
_HOT_S = 10.0
_COUNTERS = ("tandem_adapter_loads_total", "tandem_adapter_copies_total")


class Fleet:
    """One of both, and what was asked of it."""

    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession) -> None:
        self._cluster, self._http = cluster, http
        self.records: list[RequestRecord] = []

    async def window(self, config: LoadConfig, turn: int) -> Sequence[RequestRecord]:
        """All requests of a window, each answered; raises Internal where one was not."""
        plan = with_other_prompts(plan_run(config), turn)
        records = (await measure_plan(plan, "", asyncio.Event(), log=False)).records
        for record in records:
            if record.failure is not None:
                raise Internal(f"{record.model or 'the base'}: {record.failure.message}")
        return records

    async def count(self, name: str) -> int:
        """The sum of a counter over all workers."""
        found = 0.0
        for part, address in self._cluster.metrics.items():
            if part.startswith(("prefill", "decode")):
                async with self._http.get(f"http://{address}/metrics") as page:
                    families = text_string_to_metric_families(await page.text())
                    found += sum(one.value for each in families for one in each.samples if one.name == name)
        return int(found)

    @property
    def target(self) -> str:
        """Address to which the load is sent."""
        return f"grpc://{self._cluster.grpc}"


def write_adapters(folder: Path, count: int, rank: int) -> dict[str, Path]:
    """Adapters of the demo model by name, and HOT besides."""
    config, names = load_config(DEMO), [*(f"a{number}" for number in range(count)), HOT]
    return {
        name: write_random_adapter(folder / name, config, rank, seed=seed, dtype=torch.bfloat16)
        for seed, name in enumerate(names)
    }


@asynccontextmanager
async def fleet_of(
    folder: Path, workers: int, adapters: dict[str, Path], slots: int, host_bytes: int
) -> AsyncIterator[Fleet]:
    """Running workers of both roles that know these adapters."""
    flags = ("--adapter-slots", str(slots), "--adapter-host-bytes", str(host_bytes))
    named = " ".join(f"{name}={path}" for name, path in adapters.items())
    cluster = timed_cluster(folder, workers, "collocated", Slo(ttft_s=1.0), flags, adapters=named)
    async with cluster, aiohttp.ClientSession() as http:
        yield Fleet(cluster, http)


def ttft_ms(records: Sequence[RequestRecord]) -> Iterator[float]:
    """TTFT of each answer, milliseconds."""
    return (1e3 * one.ttft_s for one in map(request_metrics, records) if one is not None)


def main(
    workers: Annotated[int, Option("of both roles")] = 8,
    adapters: Annotated[int, Option()] = 200,
    slots: Annotated[int, Option("of each worker")] = 16,
    host_mib: Annotated[int, Option("each worker's memory for copies; 0 = none: each load reads files")] = 512,
    skew: Annotated[float, Option("exponent of Zipf's law")] = 1.0,
    rank: Annotated[int, Option()] = 16,
    rate: Annotated[float, Option("requests/s")] = 40.0,
    prompt_tokens: Annotated[int, Option()] = 128,
    answer_tokens: Annotated[int, Option()] = 24,
    slo: Annotated[str, Option("targets beside a hot adapter")] = "ttft=1s,tpot=50ms",
    window: Annotated[int, Option("seconds")] = 40,
    rounds: Annotated[int, Option("windows of each fleet, in turns; the first is a warm-up")] = 4,
    seed: Annotated[int, Option()] = 0,
    out: Out = None,
) -> None:
    """Measure TTFT and loads of a fleet whose adapters do not all fit, and of one where they do."""
    targets, report = parse_slo(slo), Report(out)
    names = tuple(f"a{number}" for number in range(adapters))

    def config(fleet: Fleet, turn: int, asked: Sequence[str], part: float = 1.0) -> LoadConfig:
        return LoadConfig(
            fleet.target, f"random:input={prompt_tokens},output={answer_tokens}", targets,
            Traffic(arrivals="poisson", rate=part * rate), Limits(duration_s=window), seed=seed * 1000 + turn,
            adapters=tuple(asked), adapter_skew=skew, num_warmup=0,
        )  # fmt: skip

    async def measure(folder: Path) -> None:
        known = write_adapters(folder / "adapters", adapters, rank)
        async with (
            fleet_of(folder / "few", workers, known, slots, host_mib << 20) as pressed,
            fleet_of(folder / "all", workers, known, adapters + 1, host_mib << 20) as resident,
        ):
            before = [await pressed.count(name) for name in _COUNTERS]
            asked: list[str] = []
            for turn in range(rounds):
                for fleet in (pressed, resident) if turn % 2 else (resident, pressed):
                    records = await fleet.window(config(fleet, turn, names), turn)
                    fleet.records += records if turn else []
                asked += islice(draw_adapters(names, skew, seed * 1000 + turn), len(records))
            loads, copied = [await pressed.count(name) - then for name, then in zip(_COUNTERS, before, strict=True)]
            known_loads = assigned_loads(asked, workers, slots)
            p99, base = (percentile(list(ttft_ms(fleet.records)), 99) for fleet in (pressed, resident))
            _, sudden = await asyncio.gather(
                pressed.window(config(pressed, rounds, names, 0.5), rounds),
                pressed.window(config(pressed, rounds + 1, [HOT], 0.5), rounds + 1),
            )
            first = goodput([one for one in sudden if (one.due_s or 0.0) < _HOT_S], targets, _HOT_S).attainment
            report.add(
                [
                    *(
                        Result(f"{title}, TTFT p{percent}", percentile(list(ttft_ms(fleet.records)), percent), "ms")
                        for title, fleet in ((RESIDENT, resident), (PRESSED, pressed))
                        for percent in (50, 99)
                    ),
                    Result("p99 TTFT over all resident", p99 / base, "x", 1.5, 1.5 * base / p99),
                    Result("loads", loads, ""),
                    Result("loads from copies", copied, ""),
                    Result(
                        "loads over the best assignment by shares",
                        loads / known_loads,
                        "x",
                        1.2,
                        1.2 * known_loads / max(1, loads),
                    ),
                    Result(f"a hot adapter, in time in its first {_HOT_S:g} s", 100 * first, "%", 95, first / 0.95),
                ]
            )
            print(f"{len(asked)} requests a fleet, {len(resident.records)} of them behind the warm-up")

    with tempfile.TemporaryDirectory(prefix="tandem-adapters-") as temporary:
        asyncio.run(measure(Path(temporary)))
    print(f"{workers} timed workers, {adapters} adapters, {slots} slots, {rate:g} requests/s, {machine()}\n")
    report.print()
