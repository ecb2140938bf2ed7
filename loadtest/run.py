"""One run: from a LoadConfig to its records."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from loadtest.clients.base import CauseLine, Client, RequestFailed, TargetInfo
from loadtest.config import LoadConfig
from loadtest.driver.collector import Collector
from loadtest.driver.loops import OpenLoop, run_closed_loop
from loadtest.driver.sender import Sender
from loadtest.records import FailureCause, RequestRecord
from loadtest.schedule import Schedule, draw_adapters, streams
from loadtest.workloads.conversation import Workload, ideal_cached_share
from loadtest.workloads.spec import TraceOptions, parse_workload
from loadtest.workloads.tokens import TokenSource
from loadtest.workloads.trace import Replay, parse_slice
from shared.errors import ConfigError, WorkerLost

_WARMUP = 1 << 32
"""Added to the seed for warm-up prompts, so that they share no cached prefix with the run's prompts."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of a run."""

    config: LoadConfig
    target: TargetInfo
    records: tuple[RequestRecord, ...]
    started_at: str  # ISO 8601, UTC
    duration_s: float
    """Seconds from the start to the last answer."""
    window_s: float
    """The time over which requests were offered. Seconds."""
    planned_requests: int | None
    """Number of requests in the schedule; None in a closed loop."""
    ideal_cached_share: float | None
    """Share of the planned prompt tokens that an unlimited cache would hit; None in a closed loop."""
    stopped: str
    """Why the run ended early; empty if it did not."""
    own_load: OwnLoad | None = None
    """This process's CPU use; None if not measured."""
    causes: tuple[CauseLine, ...] = ()
    """What the target says that requests were lost to, by its own targets; empty if it does not say."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, validated as far as possible without the target."""

    config: LoadConfig
    workload: Workload
    tokens: TokenSource
    schedule: Schedule | None
    """None: closed loop."""


def plan_run(config: LoadConfig) -> Plan:
    """Reads the workload and makes the schedule; raises ConfigError naming the wrong setting."""
    options = TraceOptions(parse_slice(config.slice), config.scale, config.scale_output)
    workload = parse_workload(config.workload, options)
    tokens = TokenSource(config.seed, config.vocab_size)
    if isinstance(workload, Replay) and any(request.hash_ids for request in workload.requests):
        tokens.check_block(workload.scaled_block_len)
    if config.traffic.concurrency is not None:
        if config.limits.duration_s is None and config.limits.num_requests is None and not workload.timed:
            raise ConfigError("duration is missing: the workload has no end of its own", field="duration")
        return Plan(config, workload, tokens, None)
    return Plan(config, workload, tokens, config.traffic.schedule(workload, config.limits, config.seed))


async def execute(
    plan: Plan,
    client: Client,
    stop: asyncio.Event,
    on_progress: Callable[[Collector], None] | None = None,
) -> RunResult:
    """Runs a plan; `stop` ends it early with the results so far. The caller closes the client.

    Raises WorkerLost if the target cannot be reached, ConfigError if it refuses the first request.
    """
    config = plan.config
    target = TargetInfo(config.model)
    collector = Collector(config.slo)

    async def prepare() -> None:
        nonlocal target
        try:
            target = await client.start()
        except RequestFailed as error:
            raise WorkerLost(f"{config.target} does not serve: {error.failure.message}") from error
        await _warm_up(plan, client)

    await run_until_stopped(prepare(), stop, collector, give_up_s=0.0)
    run_id = f"lt{config.seed:x}-{time.time_ns() // 1_000_000:x}"
    models = draw_adapters(config.adapters, config.adapter_skew, config.seed) if config.adapters else None
    sender = Sender(client, plan.tokens, collector, run_id, config.request_timeout_s, config.ignore_eos, models)
    open_loop = None
    if plan.schedule is not None:
        open_loop = OpenLoop(plan.schedule, sender, collector)
        open_loop.prepare()
    with _no_collections():
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        meter = OwnLoadMeter()
        collector.begin()
        if open_loop is not None:
            load = open_loop.run()
        else:
            _, rng = streams(config.seed)
            conversations = plan.workload.conversations(rng)
            load = run_closed_loop(conversations, config.traffic.concurrency or 1, config.limits, sender, collector)
        stopped = await run_until_stopped(load, stop, collector, config.give_up_s, on_progress)
        duration_s = collector.now_s
        own_load = meter.read()
    if on_progress is not None:
        on_progress(collector)
    window_s = duration_s
    if plan.schedule is not None:
        window_s = min(plan.schedule.window_s, duration_s) if stopped else plan.schedule.window_s
    ideal = None
    if plan.schedule is not None:
        ideal = ideal_cached_share(due.conversation for due in plan.schedule.entries)
    return RunResult(
        config=config,
        target=target,
        records=tuple(sorted(collector.records, key=lambda record: record.index)),
        started_at=started_at,
        duration_s=duration_s,
        window_s=window_s,
        planned_requests=None if plan.schedule is None else plan.schedule.num_requests,
        ideal_cached_share=ideal,
        stopped=stopped,
        own_load=own_load,
        causes=await client.causes(duration_s) if collector.records else (),
    )


async def _warm_up(plan: Plan, client: Client) -> None:
    """Sends a few requests like the run's own, so that errors common to all show before the clock starts."""
    config = plan.config
    tokens = TokenSource(config.seed + _WARMUP, config.vocab_size)
    collector = Collector(None)
    collector.begin()
    sender = Sender(client, tokens, collector, f"warmup{config.seed:x}", config.request_timeout_s, config.ignore_eos)
    conversations = plan.workload.conversations(np.random.default_rng([config.seed, 3]))
    for _, conversation in zip(range(config.num_warmup), conversations, strict=False):
        await sender.run(conversation, sender.prepare(conversation, None))
    failure = collector.last_failure
    if failure is not None and failure.cause is not FailureCause.OVERLOADED:  # a target may refuse by its own limits
        message = f"{config.target} did not answer the warm-up ({failure.cause.value}): {failure.message}"
        if failure.cause in (FailureCause.REJECTED, FailureCause.PROTOCOL):
            raise ConfigError(message, field="target")
        raise WorkerLost(message)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disables Python's cyclic garbage collector during the run; a run keeps its allocations anyway."""
    was_frozen = gc.get_freeze_count() > 0  # by who called, for good
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not was_frozen:
            gc.unfreeze()


PROGRESS_EVERY_S = 0.5
_LOOK_EVERY_S = 0.25


async def run_until_stopped(
    load: Coroutine[None, None, None],
    stop: asyncio.Event,
    collector: Collector,
    give_up_s: float,
    on_progress: Callable[[Collector], None] | None = None,
) -> str:
    """Runs `load` to its end or until it is stopped; returns the reason, empty if it came to its end.

    It is stopped by `stop`, which if set already keeps it from beginning, and if no connection to the target could be
    made for `give_up_s` (0 = never).
    """
    if stop.is_set():
        load.close()
        return "stopped by the user"
    running = asyncio.create_task(load)
    stopping = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(_until_target_gone(collector, give_up_s))
    showing = asyncio.create_task(_show(collector, on_progress))
    try:
        await asyncio.wait({running, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            return ""
        return watching.result() if watching.done() else "stopped by the user"
    finally:
        for task in (running, stopping, watching, showing):
            task.cancel()
        await asyncio.gather(running, stopping, watching, showing, return_exceptions=True)


async def _until_target_gone(collector: Collector, give_up_s: float) -> str:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        since_s = collector.unreachable_since_s
        if give_up_s and since_s is not None and collector.now_s - since_s >= give_up_s:
            reason = collector.last_failure.message if collector.last_failure is not None else "no connection"
            return f"the target was gone from {since_s:.1f} s on: {reason}"


async def _show(collector: Collector, on_progress: Callable[[Collector], None] | None) -> None:
    while on_progress is not None:
        on_progress(collector)
        await asyncio.sleep(PROGRESS_EVERY_S)


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """The generator's CPU use over a run, as shares of its duration."""

    cpu_share: float
    """Time on a core. Near 1, one whole core, the generator is at its limit."""
    waited_share: float | None
    """Time that it was runnable but had no core, summed over threads; None if the system does not report it."""
    stolen_share: float | None
    """Share of the cores' time that the hypervisor gave to others; None if not reported."""

    def __str__(self) -> str:
        parts = [f"used {self.cpu_share:.0%} of a core"]
        if self.waited_share is not None:
            parts.append(f"waited {self.waited_share:.1%} of the time for one")
        if self.stolen_share:
            parts.append(f"the hypervisor took {self.stolen_share:.1%}")
        return ", ".join(parts)


class OwnLoadMeter:
    """Measures from its construction to `read`."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._waited_s = _waited_s()
        self._ticks = _ticks()

    def read(self) -> OwnLoad:
        """The shares so far."""
        duration_s = max(time.perf_counter() - self._start_s, 1e-9)
        waited_s, ticks = _waited_s(), _ticks()
        waited_share = stolen_share = None
        if waited_s is not None and self._waited_s is not None:
            waited_share = max(waited_s - self._waited_s, 0.0) / duration_s
        if ticks is not None and self._ticks is not None:
            total, stolen = ticks[0] - self._ticks[0], ticks[1] - self._ticks[1]
            stolen_share = stolen / total if total > 0 else 0.0
        return OwnLoad((time.process_time() - self._cpu_s) / duration_s, waited_share, stolen_share)


def _waited_s() -> float | None:
    """Sum over this process's threads, from Linux's schedstat: ns on a core, ns waiting for one, time slices."""
    waited_ns = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            try:
                waited_ns += int((task / "schedstat").read_text().split()[1])
            except FileNotFoundError:
                continue  # the thread has ended
    except (OSError, ValueError, IndexError):
        return None
    return waited_ns / 1e9


def _ticks() -> tuple[int, int] | None:
    """All cores' ticks and the stolen ones among them, since the system started."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(fields), fields[7]) if len(fields) == 8 else None
