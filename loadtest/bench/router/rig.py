"""One router process on a core of its own; scripted workers and clients, in processes of their own, on the others."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shared.errors import Internal

ROUTER = "services.router"
PROMPT_TOKENS = 500
STOP_S = 120.0
CLIENT_S = 300.0
_DEMO = Path("models/demo")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a load's clients and the router's process say."""

    requests: dict[str, tuple[float, float]]
    """Moments of each answered request: sent, and first token read; `time.perf_counter()` seconds."""
    num_tokens: int
    num_messages: int
    """That the tokens came in."""
    num_failed: int
    failure: str
    """The last one."""
    tokens_per_s: float
    router_cpu_s: float
    """Processor time of the router during the load."""

    @property
    def tokens_per_cpu_s(self) -> float:
        """What the router's core can pass on when nothing keeps it waiting, requests' own cost included."""
        return self.num_tokens / self.router_cpu_s

    @property
    def cpu_ms_per_request(self) -> float:
        """Of the router's core, answers included."""
        return 1e3 * self.router_cpu_s / max(1, len(self.requests))


class Rig(AbstractContextManager["Rig"]):
    """A scripted fleet, half prefill, half decode, and a router before it. Leaves no process behind."""

    def __init__(
        self,
        num_workers: int,
        tokens_per_s: float,
        scratch: Path,
        num_sequences: int = 0,
        router: str = ROUTER,
    ) -> None:
        """Files go to the folder `scratch`; see `Script` for the pace. `router` is the module that is measured."""
        self._router = router
        cores = sorted(os.sched_getaffinity(0))
        self._router_cores, self._other_cores = cores[:1], cores[1:] or cores
        self._num_workers = num_workers
        self._pace = ["--tokens-per-s", str(tokens_per_s), "--sequences", str(num_sequences)]
        self._scratch = scratch
        self._processes: list[subprocess.Popen[str]] = []
        self._target = ""

    def __enter__(self) -> Rig:
        """Starts both; returns when every worker's session can be used."""
        half = self._num_workers // 2
        pools = ["--prefill", str(half), "--decode", str(self._num_workers - half)]
        pace = [*self._pace, "--stamps", str(self._stamps)]
        try:
            fleet = self._start("loadtest.bench.router.fleet", [*pools, *pace], self._other_cores)
            workers = {
                pool: ",".join(f"{name}={address}" for name, address in addresses.items())
                for pool, addresses in _next_line(fleet).items()
            }
            settings = {"model": str(_DEMO), "http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "queue-limit": "100000"}
            flags = itertools.chain.from_iterable(
                (f"--{name}", value) for name, value in {**settings, **workers}.items()
            )
            router = self._start(self._router, flags, self._router_cores)
            while (event := _next_line(router))["event"] != "ready":
                if event["event"] == "error":
                    raise Internal(f"the router does not start: {event['message']}")
        except BaseException:
            self._kill()
            raise
        self._target = event["grpc"]
        return self

    def __exit__(self, *_: object) -> None:
        """Ends both."""
        self._kill()

    def load(self, num_clients: int, *arguments: str) -> Measured:
        """Runs clients side by side, each with these arguments of client.py."""
        outs = [self._scratch / f"client-{i}.json" for i in range(num_clients)]
        before = self._router_cpu_s()
        clients = []
        for i, out in enumerate(outs):
            own = ["--target", self._target, "--prompt-tokens", str(PROMPT_TOKENS), "--prefix", f"c{i}-"]
            client = self._start(
                "loadtest.bench.router.client", [*own, "--out", str(out), *arguments], self._other_cores
            )
            clients.append(client)
        for client in clients:
            if client.wait(CLIENT_S) != 0:
                raise Internal(f"a client ended with status {client.returncode}")
        cpu_s = self._router_cpu_s() - before
        told = [json.loads(out.read_text()) for out in outs]
        return Measured(
            {request_id: moments for each in told for request_id, moments in each["requests"].items()},
            sum(each["num_tokens"] for each in told),
            sum(each["num_messages"] for each in told),
            sum(each["num_failed"] for each in told),
            next((each["failure"] for each in told if each["failure"]), ""),
            sum(each["tokens_per_s"] for each in told),
            cpu_s,
        )

    def stamps(self) -> dict[str, list[float]]:
        """Ends the rig; the moments that the workers noted, by request id."""
        for process in reversed(self._processes[:2]):
            process.terminate()
            process.wait(STOP_S)
        noted = json.loads(self._stamps.read_text())
        return {attempt.rpartition("#")[0]: moments for attempt, moments in noted.items()}

    @property
    def _stamps(self) -> Path:
        return self._scratch / "stamps.json"

    def _router_cpu_s(self) -> float:
        times = psutil.Process(self._processes[1].pid).cpu_times()
        return float(times.user + times.system)

    def _start(self, module: str, arguments: Any, cores: list[int]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        psutil.Process(process.pid).cpu_affinity(cores)
        self._processes.append(process)
        return process

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _next_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Internal(f"{process.args!r} ended with status {process.wait()}")
    return json.loads(line)
