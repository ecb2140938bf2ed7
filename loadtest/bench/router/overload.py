"""`python -m loadtest.bench overload`: one router at three times the load that its workers can serve.

The router is a real process on a core of its own. The scripted workers, whose prefill takes a set time a prompt, and
the clients run in this process. Expected: goodput as at capacity, refusals at once, no growth of the router's memory.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Annotated, Any

import psutil
import uvloop

from loadtest.bench.router.measured_router import ROUTER, router_process
from loadtest.bench.router.scripted_workers import DecodeWorker, PrefillWorker, Script, addresses
from loadtest.clients.base import Call, RequestFailed
from loadtest.clients.grpc_client import GrpcClient
from loadtest.clients.target import parse_target
from loadtest.records import FailureCause, Reply
from loadtest.rig.command_line import Option, Out
from loadtest.rig.measure import percentile
from loadtest.rig.processes import pinned
from loadtest.rig.results import Report, Result, machine
from shared.errors import Internal
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.tasks import end_task

NUM_PREFILLS, SERVICE_S = 2, 0.04
CAPACITY = NUM_PREFILLS / SERVICE_S
"""Requests per second."""
TARGET_S, ROUTER_TARGET_S = 0.5, 0.4
"""The client's TTFT target, and the router's setting: tighter, because under overload all answers come just in time."""
REFUSED_AT_ONCE_S = 0.05
PROMPT_TOKENS, ANSWER_TOKENS = 64, 4
_SAMPLE_S = 0.5
_MIB = 1 << 20


class BusyPrefillWorker(PrefillWorker):
    """Computes one prompt after the other, each in SERVICE_S, and reports what is queued."""

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType, script: Script) -> None:
        super().__init__(name, role, script)
        self._queue: asyncio.Queue[worker_pb2.Submit] = asyncio.Queue()

    async def on_command(self, command: Any) -> None:
        """See ScriptedWorker."""
        if isinstance(command, worker_pb2.Submit):
            self._script.stamps[command.request_id].append(perf_counter())
            self._queue.put_nowait(command)

    async def during_session(self) -> None:
        """Serves the queue."""
        while True:
            submit = await self._queue.get()
            began = perf_counter()
            await asyncio.sleep(SERVICE_S)
            await self.finish(submit, prefill_compute_ms=(perf_counter() - began) * 1e3)
            num_waiting = self._queue.qsize()
            await self.send(load=types_pb2.Load(num_queued_tokens=num_waiting * PROMPT_TOKENS, num_waiting=num_waiting))


@dataclass(slots=True)
class Offered:
    """The outcome of one load."""

    seconds: float
    num_good: int = 0
    num_late: int = 0
    """Answered, but after the target."""
    refusals_s: list[float] = field(default_factory=list)
    """Time to each 429."""
    failures: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    """The router's memory, every half second."""

    @property
    def goodput(self) -> float:
        """Requests per second that met the target."""
        return self.num_good / self.seconds

    @property
    def refused_at_once(self) -> float:
        """Share of refusals within REFUSED_AT_ONCE_S."""
        return sum(took_s <= REFUSED_AT_ONCE_S for took_s in self.refusals_s) / max(1, len(self.refusals_s))

    @property
    def growth_bytes(self) -> float:
        """Growth of the router's mean memory from the second quarter of the time to the last."""
        quarter = max(1, len(self.rss_bytes) // 4)
        return fmean(self.rss_bytes[-quarter:]) - fmean(self.rss_bytes[quarter : 2 * quarter])


@dataclass(slots=True)
class Clients:
    """Requests to one router."""

    client: GrpcClient
    router: psutil.Process
    _count: int = 0

    async def offer(self, rate: float, seconds: float) -> Offered:
        """Open loop: requests at even intervals; returns when all have ended."""
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
        tokens = [260 + (number * 31 + i * 7) % 1000 for i in range(PROMPT_TOKENS)]
        sent, reply = perf_counter(), Reply()
        try:
            await self.client.generate(self.client.encode(Call(f"o-{number}", tokens, ANSWER_TOKENS)), reply)
        except RequestFailed as error:
            if error.failure.cause is FailureCause.OVERLOADED:
                offered.refusals_s.append(perf_counter() - sent)
            else:
                offered.failures.append(f"{error.failure.kind}: {error}")
            return
        if reply.token_times_s[0] - sent <= TARGET_S:
            offered.num_good += 1
        else:
            offered.num_late += 1

    async def _sample(self, offered: Offered) -> None:
        while True:
            offered.rss_bytes.append(self.router.memory_info().rss)
            await asyncio.sleep(_SAMPLE_S)


@asynccontextmanager
async def overloaded_router() -> AsyncIterator[Clients]:
    """The workers, the router in front of them and its clients; stops all processes at the end."""
    script = Script(tokens_per_s=20_000.0)
    prefills = [BusyPrefillWorker(f"p{i}", types_pb2.WORKER_ROLE_PREFILL, script) for i in range(NUM_PREFILLS)]
    decodes = [DecodeWorker("d0", types_pb2.WORKER_ROLE_DECODE, script)]
    cores = sorted(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        for worker in (*prefills, *decodes):
            await worker.start()
            stack.push_async_callback(worker.stop)
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        process = router_process(
            Path(scratch),
            ROUTER,
            {
                "prefill": addresses(prefills),
                "decode": addresses(decodes),
                "max-queued-tokens": PROMPT_TOKENS + 1,  # one waits at the worker, the others in the router
                "admission.ttft-target-s": ROUTER_TARGET_S,
            },
        )
        ready = await stack.enter_async_context(pinned(process, cores[:1]))
        client = GrpcClient(parse_target(f"grpc://{ready.endpoints['grpc']}"))
        stack.push_async_callback(client.close)
        client.connect()
        while not (await client.status()).ready:  # noqa: ASYNC110 - the router does not say when
            await asyncio.sleep(0.05)
        yield Clients(client, psutil.Process(process.pid))


async def measure(capacity_s: float, overload_s: float) -> tuple[Offered, Offered]:
    """A load just below capacity, then one of three times the capacity."""
    async with overloaded_router() as clients:
        await clients.offer(CAPACITY / 2, 2.0)  # the router learns the time of a prompt
        full = await clients.offer(0.9 * CAPACITY, capacity_s)
        over = await clients.offer(3 * CAPACITY, overload_s)
    for offered in (full, over):
        if offered.failures:
            raise Internal(f"{len(offered.failures)} requests failed, such as: {offered.failures[-1]}")
    return full, over


def results(full: Offered, over: Offered) -> list[Result]:
    """The figures."""
    refused_ms = [1e3 * took_s for took_s in over.refusals_s]
    return [
        Result("goodput at 0.9 of the capacity", full.goodput, "req/s", limit=CAPACITY),
        Result(
            "goodput at 3 times the capacity", over.goodput, "req/s", limit=CAPACITY, fraction=over.goodput / CAPACITY
        ),
        Result("answered too late at 3 times", float(over.num_late), "requests"),
        Result("refused at 3 times", float(len(over.refusals_s)), "requests"),
        Result("of these within 50 ms", 100 * over.refused_at_once, "%", limit=100.0),
        Result("time to a 429, p50", percentile(refused_ms, 50), "ms"),
        Result("time to a 429, p99", percentile(refused_ms, 99), "ms", limit=1e3 * REFUSED_AT_ONCE_S),
        Result("time to a 429, longest", max(refused_ms), "ms"),
        Result("router's memory at the end", over.rss_bytes[-1] / _MIB, "MiB"),
        Result("its growth from the second to the last quarter", over.growth_bytes / _MIB, "MiB"),
    ]


def main(
    capacity_s: Annotated[float, Option(help="seconds just below the capacity")] = 8.0,
    overload_s: Annotated[float, Option(help="seconds at three times the capacity")] = 60.0,
    out: Out = None,
) -> None:
    """Offer one router three times what its workers can serve: goodput, time to a refusal, memory."""
    print(f"{machine()}; {NUM_PREFILLS} prefill workers of {1 / SERVICE_S:g} prompts/s, target {TARGET_S:g} s")
    full, over = uvloop.run(measure(capacity_s, overload_s))
    report = Report(out)
    report.add(results(full, over))
    report.print()
