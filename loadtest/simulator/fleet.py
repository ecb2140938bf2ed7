"""Types and state shared by all simulated workers and routers of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loadtest.simulator.clock import Clock
from loadtest.simulator.prefix_cache import PrefixCache, PrefixIndex
from shared.sizing.step_time import StepTimes


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One simulated engine, of either role."""

    times: StepTimes
    num_blocks: int
    link: float
    """Bytes/s between two workers."""
    kv_bytes_per_token: int
    block_size: int = 16
    run_len: int = 512
    """Tokens represented by one hash id of the trace."""
    max_num_seqs: int = 256
    chunk_tokens: int = 8192
    """Token budget of a prefill worker's step."""
    here_chunk_tokens: int = 512
    """Prompt tokens that a decode worker computes together with its batch in one step."""
    message_s: float = 0.5e-3
    """One-way latency between a router and a worker."""
    report_s: float = 5e-3
    """Minimum time between two load reports."""


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's state, as in its load report."""

    num_free_blocks: int
    num_requests: int
    num_queued_tokens: int


class Reported(Protocol):
    """A worker that sends load reports."""

    name: str

    def report(self) -> Report:
        """Its current state."""
        ...


class Reporter:
    """Sends a worker's newest state to every router, at most once an interval."""

    def __init__(self, clock: Clock, spec: WorkerSpec, worker: Reported) -> None:
        self._clock, self._spec, self._worker = clock, spec, worker
        self._routers: list[Listener] = []
        self._pending = False
        self._last_s = -spec.report_s

    def listen(self, router: Listener) -> None:
        """Sends further reports to this router too."""
        self._routers.append(router)

    def changed(self) -> None:
        """The worker's state has changed."""
        if not self._pending:
            self._pending = True
            ready_s = max(self._clock.now_s, self._last_s + self._spec.report_s)
            self._clock.at(ready_s + self._spec.message_s, self._send)

    def _send(self) -> None:
        self._pending = False
        self._last_s = self._clock.now_s
        report = self._worker.report()
        for router in self._routers:
            router.on_report(self._worker.name, report)


class Listener(Protocol):
    """A router, as workers see it."""

    def on_report(self, worker: str, report: Report) -> None:
        """A load report arrived."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """Clock, index and the workers' specifications; what is no worker's own is the same in both."""

    clock: Clock
    index: PrefixIndex
    spec: WorkerSpec
    """Of prefill workers, and of decode workers unless they have one of their own."""
    own_decode_spec: WorkerSpec | None = None

    @property
    def decode_spec(self) -> WorkerSpec:
        """Of decode workers."""
        return self.own_decode_spec or self.spec

    def prefix_cache(self, worker: str, spec: WorkerSpec) -> PrefixCache:
        """An empty pool for that worker, which reports its content to the index."""
        return PrefixCache(
            spec.num_blocks,
            spec.block_size,
            spec.run_len,
            lambda run: self.index.add(run, worker),
            lambda run: self.index.remove(run, worker),
        )
