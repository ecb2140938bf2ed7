"""One router process on a core of its own; scripted workers and clients, in processes of their own, on the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.rig.processes import END_S, module_process, pinned
from shared.child_process import ChildProcess
from shared.errors import Internal

ROUTER = "services.router"
PROMPT_TOKENS = 500
CLIENT_S = 300.0
_DEMO = Path("models/demo")
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3) makes the same number of it and the process id


@dataclass(frozen=True, slots=True)
class Measured:
    """What the clients and the router's process measured of one load."""

    requests: dict[str, tuple[float, float]]
    """Times of each answered request: sent, and first token read; `time.perf_counter()` seconds."""
    num_tokens: int
    num_messages: int
    """Messages that carried tokens."""
    num_failed: int
    failure: str
    """Message of the last failure."""
    tokens_per_s: float
    router_cpu_s: float
    """Processor time of the router during the load."""

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens that a fully busy core of the router passes on in a second, including the cost of the requests."""
        return self.num_tokens / self.router_cpu_s

    @property
    def cpu_ms_per_request(self) -> float:
        """Processor time of the router for each request, answers included."""
        return 1e3 * self.router_cpu_s / max(1, len(self.requests))


def router_process(scratch: Path, module: str, settings: Mapping[str, object]) -> ChildProcess:
    """A router over the demo model on free ports, not started yet, with further settings by flag name."""
    flags = {"model": _DEMO, "http": "127.0.0.1:0", "grpc": "127.0.0.1:0", **settings}
    return module_process("router", module, scratch, flags)


class MeasuredRouter:
    """A scripted fleet, half prefill, half decode, and a router in front of it; an asynchronous context manager."""

    def __init__(
        self,
        num_workers: int,
        tokens_per_s: float,
        scratch: Path,
        num_sequences: int = 0,
        router: str = ROUTER,
    ) -> None:
        """Files go to the folder `scratch`; see `Script` for the pace. `router` is the measured module."""
        self._module = router
        self._scratch = scratch
        self._cores = sorted(os.sched_getaffinity(0))
        self._stamps = scratch / "stamps.json"
        self._running = AsyncExitStack()
        half = num_workers // 2
        flags = {
            "prefill": half, "decode": num_workers - half, "tokens-per-s": tokens_per_s, "sequences": num_sequences,
            "stamps": self._stamps,
        }  # fmt: skip
        self._fleet = module_process("fleet", "loadtest.bench.router.scripted_workers", scratch, flags)

    async def __aenter__(self) -> MeasuredRouter:
        """Starts both; returns when all sessions with workers are open."""
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(pinned(self._fleet, self._other_cores))
            flags = {"queue-limit": 100_000, **fleet.endpoints}
            self._router = router_process(self._scratch, self._module, flags)
            router = await stack.enter_async_context(pinned(self._router, self._cores[:1]))
            self._target = router.endpoints["grpc"]
            self._running = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends both."""
        await self._running.aclose()

    @property
    def _other_cores(self) -> list[int]:
        """All but the router's, where there are others."""
        return self._cores[1:] or self._cores

    async def load(self, num_clients: int, **flags: object) -> Measured:
        """Runs clients in parallel, each with these flags of client.py (`max_tokens` for `--max-tokens`)."""
        outs = [self._scratch / f"client-{i}.json" for i in range(num_clients)]
        before = self.router_cpu_s()
        clients = []
        try:
            for i, out in enumerate(outs):
                own = {"target": self._target, "prompt_tokens": PROMPT_TOKENS, "prefix": f"c{i}-", "out": out, **flags}
                client = module_process(f"client-{i}", "loadtest.bench.router.client", self._scratch, own)
                clients.append(client)
                await client.start()
                os.sched_setaffinity(client.pid, self._other_cores)
            for client in clients:
                if await client.wait(CLIENT_S) != 0:
                    raise Internal(f"a client ended with {client.exit_text()}: {client.log_tail()}")
        finally:
            for client in clients:
                client.kill()
                await client.stop(END_S)
        cpu_s = self.router_cpu_s() - before
        figures = [json.loads(out.read_text()) for out in outs]
        return Measured(
            {request_id: moments for each in figures for request_id, moments in each["requests"].items()},
            sum(each["num_tokens"] for each in figures),
            sum(each["num_messages"] for each in figures),
            sum(each["num_failed"] for each in figures),
            next((each["failure"] for each in figures if each["failure"]), ""),
            sum(each["tokens_per_s"] for each in figures),
            cpu_s,
        )

    async def stamps(self) -> dict[str, list[float]]:
        """Stops the workers and router; returns the workers' time stamps by request id."""
        for process in (self._router, self._fleet):
            await process.stop(END_S)
        noted = json.loads(self._stamps.read_text())
        return {attempt.rpartition("#")[0]: moments for attempt, moments in noted.items()}

    def router_cpu_s(self) -> float:
        """Processor time of the router since it started; by the process's own clock, which counts in nanoseconds."""
        return time.clock_gettime(~self._router.pid << 3 | _CPUCLOCK_SCHED)
