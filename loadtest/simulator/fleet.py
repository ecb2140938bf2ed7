"""What all simulated workers and routers of one run share, and what a worker is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from loadtest.simulator.clock import Clock
from loadtest.simulator.prefix_index import PrefixIndex
from services.router.placement.views import Tier
from shared.sizing.step_time import StepKinds, StepTimes, StepWork

PREFILL_CHUNK, DECODE_CHUNK = 8192, 512
"""Token budgets of a step that workers on GPUs have by default: of prefill workers, and of all others."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One simulated engine."""

    times: StepTimes
    num_blocks: int
    link: float
    """Bytes/s between two workers."""
    kv_bytes_per_token: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = PREFILL_CHUNK
    """Token budget of a step."""
    tpot_target_s: float = 0.0
    """See `SchedulerConfig`; 0 = steps are bounded by tokens alone."""
    itl_target_s: float = 0.0
    output_quantile: float = 0.75
    max_overtaken_s: float = 0.1
    plans_ahead: bool = True
    """A step is planned while the one before runs, as on a GPU."""
    residuals: Sequence[float] = ()
    """Measured times of steps over those predicted, from which noise is drawn; empty: none."""
    stretch: int = 1
    """Steps one behind the other that have the same noise: a machine that is busy otherwise stays so for a while."""
    message_s: float = 0.5e-3
    """One-way latency between a router and a worker."""
    wire_s: float = 0.1e-3
    """One-way latency between two workers."""
    report_s: float = 5e-3
    """Seconds between two load reports at least: a change after a longer time is sent at once."""
    adapter_slots: int = 16
    """Adapters that lie ready at once."""
    adapter_readers: int = 1
    """Adapters that are read at once."""
    adapter_load_s: float = 0.0
    """Seconds that the load of one takes from its folder, beside the steps."""
    adapter_copies: int = 0
    """Adapters of which the host keeps a copy."""
    adapter_copy_s: float = 0.0
    """Seconds that the load of one takes from there."""
    decoding_report_s: float = 0.1
    """Between two load reports while nothing but decoding happens."""


def with_chunk(spec: WorkerSpec, num_tokens: int) -> WorkerSpec:
    """With that token budget of a step and no more sequences: a step has a token of each, see `WorkerSettings`."""
    return replace(spec, max_num_batched_tokens=num_tokens, max_num_seqs=min(spec.max_num_seqs, num_tokens))


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's state, as in the message `Load`."""

    num_free_blocks: int
    """Beyond what running answers are expected to take."""
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_queued_pairs: int
    decoding: StepWork
    """A step of all answers that run there."""
    promised: StepWork
    """A step of those to come; see `Scheduler`."""
    least_slack_s: float | None
    adapters: Mapping[str, Tier] | None
    """Known adapter → where it is; None: as in the report before."""
    loading_adapters: frozenset[str]
    """Adapters that come into a slot just now."""
    adapter_room: int
    """Further adapters that it could load at once."""
    step_times: StepTimes | None
    """None where too few steps were measured, or nothing reads them."""
    step_kinds: StepKinds
    """Kinds of steps that these were fitted to."""


class Listener(Protocol):
    """A router, as workers see it."""

    def on_report(self, worker: str, report: Report) -> None:
        """A load report arrived."""


@dataclass(frozen=True, slots=True)
class World:
    """Clock and index."""

    clock: Clock
    index: PrefixIndex
    step_by_step: bool = False
    """See `Engine`."""
    seed: int = 0
    reports_times: bool = False
    """Load reports carry the fitted step times, which cost time to fit."""
    adapters: Sequence[str] = ()
    """Adapters that all workers know."""
    listeners: list[Listener] = field(default_factory=list)
    """The routers, which get each worker's reports."""
