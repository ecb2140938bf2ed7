"""One run: from a LoadConfig to its records."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from loadtest.clients.base import CauseLine, Client, RequestFailed, TargetInfo
from loadtest.config import LoadConfig
from loadtest.driver.collector import Collector
from loadtest.driver.loops import OpenLoop, run_closed_loop
from loadtest.driver.own_load import OwnLoad, OwnLoadMeter
from loadtest.driver.sender import Sender
from loadtest.driver.watch import run_until_stopped
from loadtest.records import RequestRecord
from loadtest.schedule import Schedule, streams
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
    """From the start to the last answer."""
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
    try:
        target = await client.start()
    except RequestFailed as error:
        raise WorkerLost(f"{config.target} does not serve: {error.failure.message}") from error
    await _warm_up(plan, client)
    collector = Collector(config.slo)
    run_id = f"lt{config.seed:x}-{time.time_ns() // 1_000_000:x}"
    sender = Sender(client, plan.tokens, collector, run_id, config.request_timeout_s, config.ignore_eos)
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
        causes=await client.causes(duration_s),
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
    if (failure := collector.last_failure) is not None:
        raise ConfigError(
            f"{config.target} did not answer the warm-up ({failure.cause.value}): {failure.message}", field="target"
        )


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
