"""`python -m loadtest.bench batch-beside`: what a batch costs interactive requests, and what it gets of the idle rest.

Workers are timed devices behind a real router, real sessions and hand-offs. A batch alone says how many requests a
second there is room for; interactive ones of the same lengths arrive at a share of that, in windows without a batch and
beside one, in turns. What they leave idle is the rest of that rate.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, TypeVar

import aiohttp

from loadtest.baseline.workloads import with_other_prompts
from loadtest.commands import measure_plan
from loadtest.config import LoadConfig, Traffic
from loadtest.metrics import goodput, request_metrics
from loadtest.records import RequestRecord
from loadtest.rig.cluster import Extras, local_cluster
from loadtest.rig.command_line import Option, Out, choice
from loadtest.rig.measure import percentile
from loadtest.rig.models import DEMO
from loadtest.rig.results import Report, Result, machine
from loadtest.run import plan_run
from loadtest.schedule import Limits
from loadtest.slo import Slo, parse_slo
from loadtest.workloads.tokens import Span, TokenSource
from services.local.cluster import LocalCluster
from shared.errors import Internal

T = TypeVar("T")

STEP_TIMES = {
    "fixed_s": 2e-3, "read_s": 15e-3, "token_s": 3e-4, "sequence_s": 1e-4, "kv_s": 2e-7, "attention_s": 1e-7,
}  # fmt: skip
"""Step times of each worker: slow enough that two shared cores carry the router and the clients besides."""
MODES = ("auto", "disaggregated", "collocated")
BESIDE = "batch beside interactive"
_MOST_LINES = 20_000
_POLL_S, _SETTLE_S, _LIMIT_S = 0.2, 3.0, 300.0


class Batches:
    """The batch API of a router, for one batch at a time."""

    def __init__(self, http: aiohttp.ClientSession, lengths: tuple[int, int]) -> None:
        """`lengths`: tokens of each line's prompt and answer."""
        self._http, self._lengths, self._source = http, lengths, TokenSource(7)

    async def _ask(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        async with self._http.request(method, path, **content) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise Internal(f"{path}: {answer}")
            return answer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """A batch of more lines than will be answered, under way; it is cancelled behind the block."""
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", self._lines(), filename="lines.jsonl")
        file = await self._ask("POST", "/v1/files", data=form)
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        name = (await self._ask("POST", "/v1/batches", json=wanted))["id"]
        await self._until(name, lambda batch: batch["request_counts"]["completed"] > 0)
        await asyncio.sleep(_SETTLE_S)
        yield name
        await self._ask("POST", f"/v1/batches/{name}/cancel")
        await self._until(name, lambda batch: batch["status"] == "cancelled")
        await asyncio.sleep(_SETTLE_S)

    async def rate(self, name: str, meanwhile: Awaitable[T]) -> tuple[float, T]:
        """(lines answered a second while `meanwhile` is awaited, its result)."""
        before, from_s = await self._completed(name)
        found = await meanwhile
        after, until_s = await self._completed(name)
        return (after - before) / (until_s - from_s), found

    async def _completed(self, name: str) -> tuple[int, float]:
        """Lines that have an answer, and the time of that."""
        batch = await self._ask("GET", f"/v1/batches/{name}")
        if batch["request_counts"]["failed"] or batch["status"] != "in_progress":
            raise Internal(f"a batch is {batch['status']}: {batch['request_counts']}")
        return batch["request_counts"]["completed"], time.perf_counter()

    async def _until(self, name: str, is_so: Any) -> None:
        async with asyncio.timeout(_LIMIT_S):
            while not is_so(await self._ask("GET", f"/v1/batches/{name}")):  # noqa: ASYNC110  # of another process
                await asyncio.sleep(_POLL_S)

    def _lines(self) -> bytes:
        num_tokens, max_tokens = self._lengths
        lines = []
        for number in range(_MOST_LINES):
            prompt = self._source.span(Span(f"line-{time.monotonic_ns()}-{number}", num_tokens))
            body = {"model": "demo", "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}
            lines.append(
                json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
            )
        return "\n".join(lines).encode()


def timed_cluster(
    folder: Path, workers: int, mode: str, targets: Slo, worker_flags: Sequence[str] = (), **spec: Any
) -> LocalCluster:
    """A cluster of workers whose steps take STEP_TIMES; not started. `spec`: further fields of ClusterSpec."""
    folder.mkdir(exist_ok=True)
    steps = folder / "steps.json"
    steps.write_text(json.dumps({"step_times": STEP_TIMES}))
    num_prefill = 0 if mode == "collocated" else workers // 2
    flags = [
        f"--targets.{name}-s={value}"
        for name, value in (("ttft", targets.ttft_s), ("tpot", targets.tpot_s))
        if value is not None
    ]
    return local_cluster(
        Extras(worker_flags, flags), model=DEMO, device=f"timed:{steps}", mode=mode, num_prefill=num_prefill,
        num_decode=workers - num_prefill, num_kv_blocks=4096, state_dir=folder / "state", **spec,
    )  # fmt: skip


def results(title: str, records: Sequence[RequestRecord]) -> list[Result]:
    """Times of interactive requests."""
    found = [one for one in map(request_metrics, records) if one is not None]
    ttft_ms, tpot_ms = [1e3 * one.ttft_s for one in found], [1e3 * (one.tpot_s or 0.0) for one in found]
    return [
        Result(f"{title}, TTFT p50", percentile(ttft_ms, 50), "ms"),
        Result(f"{title}, TTFT p99", percentile(ttft_ms, 99), "ms"),
        Result(f"{title}, TPOT p99", percentile(tpot_ms, 99), "ms"),
    ]


def main(
    workers: Annotated[int, Option()] = 2,
    mode: Annotated[str, Option(", ".join(MODES))] = "auto",
    load: Annotated[float, Option("of the rate that a batch alone reaches, for interactive requests")] = 0.7,
    prompt_tokens: Annotated[int, Option()] = 128,
    answer_tokens: Annotated[int, Option()] = 48,
    slo: Annotated[str, Option("targets of interactive requests")] = "ttft=500ms,tpot=50ms",
    window: Annotated[int, Option("seconds")] = 40,
    rounds: Annotated[int, Option("windows of each kind, in turns")] = 3,
    out: Out = None,
) -> None:
    """Measure goodput of interactive requests beside a batch, and the batch's throughput beside them."""
    targets, report = parse_slo(slo), Report(out)
    choice(mode, "mode", MODES)

    async def measure(folder: Path) -> None:
        cluster = timed_cluster(folder, workers, mode, targets)
        async with cluster, aiohttp.ClientSession(f"http://{cluster.http}") as http:
            batches = Batches(http, (prompt_tokens, answer_tokens))
            async with batches.running() as name:
                most, _ = await batches.rate(name, asyncio.sleep(window))
            report.add([Result("batch alone", most, "requests/s")])

            async def interactive(turn: int) -> Sequence[RequestRecord]:
                """Both windows of a round have the same arrivals."""
                config = LoadConfig(
                    f"grpc://{cluster.grpc}", f"random:input={prompt_tokens},output={answer_tokens}", targets,
                    Traffic(arrivals="poisson", rate=load * most), Limits(duration_s=window), seed=turn // 2,
                )  # fmt: skip
                plan = with_other_prompts(plan_run(config), turn)
                return (await measure_plan(plan, "", asyncio.Event(), log=False)).records

            alone, beside, rates = list[RequestRecord](), list[RequestRecord](), list[float]()
            for turn in range(2 * rounds):
                if turn % 4 in (0, 3):
                    alone += await interactive(turn)
                    continue
                async with batches.running() as name:
                    rate, records = await batches.rate(name, interactive(turn))
                rates.append(rate)
                beside += records
        report.add(results("interactive alone", alone) + results("interactive beside a batch", beside))
        reached = [100 * goodput(records, targets, window).attainment for records in (alone, beside)]
        ratio, idle = reached[1] / reached[0], (1 - load) * most
        report.add(
            [
                Result("interactive alone, in time", reached[0], "%"),
                Result("interactive beside a batch, in time", reached[1], "%", peer="alone", ratio=ratio),
                Result(BESIDE, mean(rates), "requests/s", peer="idle capacity", ratio=mean(rates) / idle),
            ]
        )
        print(f"{len(alone)} and {len(beside)} interactive requests at {load * most:.1f}/s, {targets}")

    with tempfile.TemporaryDirectory(prefix="tandem-batch-") as temporary:
        asyncio.run(measure(Path(temporary)))
    print(
        f"{workers} timed workers, mode {mode}, prompts of {prompt_tokens}, answers of {answer_tokens}, {machine()}\n"
    )
    report.print()
