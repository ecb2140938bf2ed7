"""`python -m loadtest.bench.router.overload`: one router at three times what its workers can do, for a while.

A real router process on a core of its own; scripted workers, whose prefill takes a set time a prompt, and the clients
are this process. What should come out: goodput as at capacity, refusals at once, and a router whose memory stands
still.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles
from time import perf_counter
from typing import Any

import grpc.aio
import psutil
import uvloop

from loadtest.bench.router.fleet import DecodeWorker, PrefillWorker, Script
from loadtest.figures import Result, machine, table, write
from shared.errors import Internal
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, types_pb2
from shared.rpc.server import channel
from shared.tasks import end_task

NUM_PREFILLS, SERVICE_S = 2, 0.04
CAPACITY = NUM_PREFILLS / SERVICE_S
"""Requests per second."""
TARGET_S, ROUTER_TARGET_S = 0.5, 0.4
"""What the client wants to its first token, and what the router is told: under overload all come just in time."""
REFUSED_AT_ONCE_S = 0.05
PROMPT_TOKENS, ANSWER_TOKENS = 64, 4
_DEMO = Path("models/demo")
_SAMPLE_S = 0.5
_MIB = 1 << 20


class BusyPrefillWorker(PrefillWorker):
    """Computes one prompt after the other, each in SERVICE_S, and reports what is queued."""

    async def Session(  # type: ignore[override]  # noqa: N802 - gRPC's name; grpc.aio also takes a coroutine
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """See prefill.proto."""
        await anext(request_iterator)
        await context.write(prefill_pb2.PrefillEvent(welcome=self._welcome()))
        queue: asyncio.Queue[prefill_pb2.Submit] = asyncio.Queue()
        serving = asyncio.create_task(self._serve(queue, context))
        try:
            async for command in request_iterator:
                if command.WhichOneof("command") == "submit":
                    queue.put_nowait(command.submit)
        finally:
            await end_task(serving)

    async def _serve(
        self, queue: asyncio.Queue[prefill_pb2.Submit], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        while True:
            submit = await queue.get()
            began = perf_counter()
            await asyncio.sleep(SERVICE_S)
            tokens = types_pb2.SequenceTokens(
                request_id=submit.request_id, token_ids=[5], prefill_compute_ms=(perf_counter() - began) * 1e3
            )
            await context.write(prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(tokens=tokens)))
            decode, request_id, num_tokens = self._script.hand_offs.pop(submit.ticket)
            decode.join(request_id, num_tokens - 1)
            load = types_pb2.Load(num_queued_tokens=queue.qsize() * PROMPT_TOKENS, num_waiting=queue.qsize())
            await context.write(prefill_pb2.PrefillEvent(load=load))


@dataclass(slots=True)
class Offered:
    """What became of one load."""

    seconds: float
    num_good: int = 0
    num_late: int = 0
    """Answered, but after the target."""
    refusals_s: list[float] = field(default_factory=list)
    """How long each 429 took."""
    failures: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    """Of the router, every half second."""

    @property
    def goodput(self) -> float:
        """Requests per second that met the target."""
        return self.num_good / self.seconds

    @property
    def refused_at_once(self) -> float:
        """Share of the refusals."""
        return sum(took_s <= REFUSED_AT_ONCE_S for took_s in self.refusals_s) / max(1, len(self.refusals_s))

    @property
    def growth_bytes(self) -> float:
        """Of the router's memory, from the second quarter of the time to the last, mean to mean."""
        quarter = max(1, len(self.rss_bytes) // 4)
        return fmean(self.rss_bytes[-quarter:]) - fmean(self.rss_bytes[quarter : 2 * quarter])


@dataclass(slots=True)
class Clients:
    """Requests to one router."""

    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    router: psutil.Process
    _count: int = 0

    async def offer(self, rate: float, seconds: float) -> Offered:
        """An even stream, whatever becomes of the requests; returns when all have ended."""
        offered = Offered(seconds)
        sampling = asyncio.create_task(self._sample(offered))
        began = perf_counter()
        async with asyncio.TaskGroup() as running:
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, began + number / rate - perf_counter()))
                running.create_task(self._one(offered))
        await end_task(sampling)
        return offered

    async def _one(self, offered: Offered) -> None:
        self._count += 1
        number = self._count
        request = inference_pb2.GenerateRequest(
            request_id=f"o-{number}",
            tokens=inference_pb2.TokenIds(ids=[260 + (number * 31 + i * 7) % 1000 for i in range(PROMPT_TOKENS)]),
            sampling=types_pb2.SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, seed=1),
        )
        sent, first_s = perf_counter(), 0.0
        try:
            async for message in self.stub.Generate(request):
                if message.token_ids and not first_s:
                    first_s = perf_counter() - sent
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                offered.refusals_s.append(perf_counter() - sent)
            else:
                offered.failures.append(f"{error.code().name}: {error.details()}")
            return
        if first_s <= TARGET_S:
            offered.num_good += 1
        else:
            offered.num_late += 1

    async def _sample(self, offered: Offered) -> None:
        while True:
            offered.rss_bytes.append(self.router.memory_info().rss)
            await asyncio.sleep(_SAMPLE_S)


@asynccontextmanager
async def overloaded_router() -> AsyncIterator[Clients]:
    """The workers, the router before them and its clients; leaves no process behind."""
    script = Script(tokens_per_s=20_000.0)
    prefills = [BusyPrefillWorker(f"p{i}", types_pb2.WORKER_ROLE_PREFILL, script) for i in range(NUM_PREFILLS)]
    decodes = [DecodeWorker("d0", types_pb2.WORKER_ROLE_DECODE, script)]
    prefill = ",".join([f"{worker.name}={await worker.start()}" for worker in prefills])
    decode = ",".join([f"{worker.name}={await worker.start()}" for worker in decodes])
    flags = {
        "prefill": prefill, "decode": decode, "model": str(_DEMO), "http": "127.0.0.1:0", "grpc": "127.0.0.1:0",
        "max-queued-tokens": str(PROMPT_TOKENS + 1),  # one waits at the worker, the others in the router
    }  # fmt: skip
    environment = {**os.environ, "TANDEM_ROUTER_ADMISSION__TTFT_TARGET_S": str(ROUTER_TARGET_S)}
    command = [f"--{name}={value}" for name, value in flags.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", *command, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip
    try:
        cores = sorted(os.sched_getaffinity(0))
        router = psutil.Process(process.pid)
        router.cpu_affinity(cores[:1])
        async with channel(await _address(process)) as link:
            stub = inference_pb2_grpc.InferenceServiceStub(link)
            while not (await stub.GetStatus(inference_pb2.GetStatusRequest())).ready:  # noqa: ASYNC110 - not ours
                await asyncio.sleep(0.05)
            yield Clients(stub, router)
    finally:
        process.kill()
        await process.wait()
        for worker in (*prefills, *decodes):
            await worker.stop()


async def _address(process: Process) -> str:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        event = json.loads(line)
        if event["event"] == "ready":
            return str(event["grpc"])
        if event["event"] == "error":
            raise Internal(f"the router does not start: {event['message']}")
    raise Internal("the router ended before it was ready")


async def measure(capacity_s: float, overload_s: float) -> tuple[Offered, Offered]:
    """A load just below capacity, then one of three times the capacity."""
    async with overloaded_router() as clients:
        await clients.offer(CAPACITY / 2, 2.0)  # what prompts take is learnt
        full = await clients.offer(0.9 * CAPACITY, capacity_s)
        over = await clients.offer(3 * CAPACITY, overload_s)
    for offered in (full, over):
        if offered.failures:
            raise Internal(f"{len(offered.failures)} requests failed, such as: {offered.failures[-1]}")
    return full, over


def results(full: Offered, over: Offered) -> list[Result]:
    """The figures."""
    percent = quantiles([1e3 * took_s for took_s in over.refusals_s], n=1000, method="inclusive")
    return [
        Result("goodput at 0.9 of the capacity", full.goodput, "req/s", limit=CAPACITY),
        Result(
            "goodput at 3 times the capacity", over.goodput, "req/s", limit=CAPACITY, fraction=over.goodput / CAPACITY
        ),
        Result("answered too late at 3 times", float(over.num_late), "requests"),
        Result("refused at 3 times", float(len(over.refusals_s)), "requests"),
        Result("of these within 50 ms", 100 * over.refused_at_once, "%", limit=100.0),
        Result("time to a 429, p50", percent[499], "ms"),
        Result("time to a 429, p99", percent[989], "ms", limit=1e3 * REFUSED_AT_ONCE_S),
        Result("time to a 429, longest", 1e3 * max(over.refusals_s), "ms"),
        Result("router's memory at the end", over.rss_bytes[-1] / _MIB, "MiB"),
        Result("its growth from the second to the last quarter", over.growth_bytes / _MIB, "MiB"),
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity-s", type=float, default=8.0, help="seconds just below the capacity")
    parser.add_argument("--overload-s", type=float, default=60.0, help="seconds at three times the capacity")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    print(f"{machine()}; {NUM_PREFILLS} prefill workers of {1 / SERVICE_S:g} prompts/s, target {TARGET_S:g} s")
    full, over = uvloop.run(measure(options.capacity_s, options.overload_s))
    rows = results(full, over)
    print(table(rows))
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    main()
