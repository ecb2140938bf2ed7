"""`python -m loadtest.bench batch-beside`: what a batch costs interactive requests, and what it gets of the idle rest.

Workers are timed devices behind a real router, real sessions and hand-offs. A batch alone says how many requests a
second there is room for; interactive ones of the same lengths arrive at a share of that, in windows without a batch and
beside one, in turns. What they leave idle is the rest of that rate.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import aiohttp

from loadtest.clients.base import Call, Client, RequestFailed
from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.metrics import request_metrics
from loadtest.records import RequestRecord
from loadtest.rig.cluster import Extras, local_cluster
from loadtest.rig.command_line import Option, Out, choice
from loadtest.rig.measure import percentile
from loadtest.rig.models import DEMO
from loadtest.rig.results import Report, Result, machine
from loadtest.slo import Slo, parse_slo
from loadtest.workloads.tokens import Span, TokenSource
from shared.errors import Internal

STEP_TIMES = {
    "fixed_s": 2e-3, "read_s": 15e-3, "token_s": 3e-4, "sequence_s": 1e-4, "kv_s": 2e-7, "attention_s": 1e-7,
}  # fmt: skip
"""Of each worker: slow enough that two shared cores carry the router and the clients besides."""
MODES = ("auto", "disaggregated", "collocated")

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

    async def completed(self, name: str) -> tuple[int, float]:
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


async def interactive(
    client: Client, rate: float, window_s: float, lengths: tuple[int, int], seed: int
) -> list[RequestRecord]:
    """Requests that arrive in a window, at `rate` a second in the mean, with their answers."""
    draw, source, records = random.Random(seed), TokenSource(seed), list[RequestRecord]()
    begin_s, at_s = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while (at_s := at_s + draw.expovariate(rate)) < window_s:
            number = len(records)
            record = RequestRecord(number, f"i{seed}-{begin_s:.3f}-{number}", *lengths, due_s=at_s)
            records.append(record)
            prompt = source.span(Span(f"{record.request_id}", lengths[0]))
            await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
            group.create_task(_answer(client, record, prompt))
    return records


async def _answer(client: Client, record: RequestRecord, prompt: Any) -> None:
    try:
        await client.generate(client.encode(Call(record.request_id, prompt, record.max_tokens)), record.reply)
    except RequestFailed as error:
        record.failure = error.failure


def in_time(records: list[RequestRecord], slo: Slo) -> float:
    """Share of the requests that met both targets."""
    found = [request_metrics(record) for record in records]
    return sum(one is not None and slo.met(one.ttft_s, one.tpot_s) for one in found) / len(found)


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
    targets, lengths, report = parse_slo(slo), (prompt_tokens, answer_tokens), Report(out)
    choice(mode, "mode", MODES)

    async def measure(folder: Path) -> None:
        steps = folder / "steps.json"
        steps.write_text(json.dumps({"step_times": STEP_TIMES}))
        num_prefill = 0 if mode == "collocated" else workers // 2
        flags = [f"--targets.ttft-s={targets.ttft_s}", f"--targets.tpot-s={targets.tpot_s}"]
        cluster = local_cluster(
            Extras(router_flags=flags), model=DEMO, device=f"timed:{steps}", mode=mode, num_prefill=num_prefill,
            num_decode=workers - num_prefill, num_kv_blocks=4096, state_dir=folder / "state",
        )  # fmt: skip
        async with cluster, aiohttp.ClientSession(f"http://{cluster.http}") as http:
            client = make_client(parse_target(f"grpc://{cluster.grpc}"))
            await client.start()
            batches = Batches(http, lengths)
            async with batches.running() as name:
                before, from_s = await batches.completed(name)
                await asyncio.sleep(window)
                after, until_s = await batches.completed(name)
            most = (after - before) / (until_s - from_s)
            report.add([Result("batch alone", most, "requests/s")])
            records: dict[bool, list[RequestRecord]] = {False: [], True: []}
            lines, seconds = 0, 0.0
            for turn in range(2 * rounds):
                is_beside, seed = turn % 4 in (1, 2), turn // 2
                if not is_beside:
                    records[False] += await interactive(client, load * most, window, lengths, seed)
                    continue
                async with batches.running() as name:
                    before, from_s = await batches.completed(name)
                    records[True] += await interactive(client, load * most, window, lengths, seed)
                    after, until_s = await batches.completed(name)
                lines, seconds = lines + after - before, seconds + until_s - from_s
            await client.close()
        alone, beside = (in_time(records[is_beside], targets) for is_beside in (False, True))
        for title, found in (("interactive alone", records[False]), ("interactive beside a batch", records[True])):
            times = [one for one in map(request_metrics, found) if one is not None]
            report.add(
                [
                    Result(f"{title}, TTFT p50", 1e3 * percentile([one.ttft_s for one in times], 50), "ms"),
                    Result(f"{title}, TTFT p99", 1e3 * percentile([one.ttft_s for one in times], 99), "ms"),
                    Result(f"{title}, TPOT p99", 1e3 * percentile([one.tpot_s or 0.0 for one in times], 99), "ms"),
                ]
            )
        report.add(
            [
                Result("interactive alone, in time", 100 * alone, "%"),
                Result("interactive beside a batch, in time", 100 * beside, "%", peer="alone", ratio=beside / alone),
                Result(
                    "batch beside interactive", lines / seconds, "requests/s", peer="idle capacity",
                    ratio=lines / seconds / ((1 - load) * most),
                ),
            ]
        )  # fmt: skip
        print(f"{len(records[False])} and {len(records[True])} interactive requests at {load * most:.1f}/s, {targets}")

    with tempfile.TemporaryDirectory(prefix="tandem-batch-") as temporary:
        asyncio.run(measure(Path(temporary)))
    print(
        f"{workers} timed workers, mode {mode}, prompts of {prompt_tokens}, answers of {answer_tokens}, on {machine()}"
    )
    report.print()


if __name__ == "__main__":
    main()
