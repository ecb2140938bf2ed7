"""What a cluster that runs would make of a trace in each split of its workers, by the step times that they report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import numpy as np

from loadtest.simulator.fleet import WorkerSpec
from loadtest.simulator.outcome import Targets
from loadtest.simulator.request import SimRequest
from loadtest.simulator.simulation import AUTO, COLLOCATED, STATIC, Group, Setup, play
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.workloads.trace import TraceRequest, open_trace, trace_error
from loadtest.workloads.trace_files import is_csv, read_trace
from services.router.placement.settings import PlacementSettings
from services.router.views.attribution.better_split import joined
from shared.errors import ConfigError
from shared.identity import DECODE, PREFILL
from shared.settings.common import Mode
from shared.sizing.step_time import StepTimes

QUANTILES = (0.5, 0.9)
MOST_SPLITS = 8
"""Most splits of two pools that are tried."""
NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class MeasuredWorker:
    """A worker as its router sees it."""

    name: str
    prefills: bool
    decodes: bool
    times: StepTimes | None
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_step_tokens: int
    plans_ahead: bool
    num_devices: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """A cluster as one of its routers sees it. Targets in seconds, 0 = none."""

    mode: Mode
    workers: Sequence[MeasuredWorker]
    ttft_s: float
    tpot_s: float
    refused_above_s: float
    """A predicted TTFT above which its router refuses."""
    max_queued_tokens: int


@dataclass(frozen=True, slots=True)
class Split:
    """One way to use the workers."""

    policy: str
    num_prefill: int
    num_decode: int

    @property
    def name(self) -> str:
        """`auto`, `4 collocated`, `1P:3D`."""
        if self.policy == STATIC:
            return f"{self.num_prefill}P:{self.num_decode}D"
        return f"{self.num_decode} {self.policy}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What requests of a recorded trace told beside the workers' step times."""

    residuals: Sequence[float] = ()
    """Times of steps over those reported: a worker reports the median of each kind, and the mean is more."""
    stretch: int = 1
    """Steps that such a factor lasts."""
    edge_s: Sequence[float] = ()
    """What requests waited for beside workers: tokenizing, processes that wait for a core, messages."""


@dataclass(frozen=True, slots=True)
class Served:
    """How a request of a recorded trace was served; seconds."""

    outcome: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float | None
    tpot_s: float | None

    def is_good(self, targets: Targets) -> bool:
        """Whether it was answered in time."""
        return (
            self.outcome in ("finished", "cut")
            and self.ttft_s is not None
            and self.ttft_s <= targets.ttft_s
            and (self.tpot_s or 0.0) <= targets.tpot_s
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one trace, served; seconds. Quantiles are of the requests that got an answer."""

    goodput: float
    """Requests/s that met both targets."""
    good_share: float
    """Share of all requests."""
    refused_share: float
    hit_rate: float
    """Prompt tokens that were not computed, of those of served requests."""
    ttft_s: tuple[float, ...]
    """At QUANTILES, as the next one."""
    tpot_s: tuple[float, ...]


def read_served(path: Path) -> list[Served] | None:
    """One for each request of the trace; None of a trace that does not say how they were served. Raises ConfigError."""
    if is_csv(path):
        return None
    found = []
    for number, line in open_trace(path):
        fields = json.loads(line)  # as the trace itself it was read before
        if "outcome" not in fields:
            return None
        ttft, tpot, cached = (fields.get(name) for name in ("ttft_ms", "tpot_ms", "cached_length"))
        if not all(value is None or (isinstance(value, int | float) and value >= 0) for value in (ttft, tpot, cached)):
            raise trace_error(path, number, "ttft_ms, tpot_ms and cached_length must be numbers of at least 0")
        seconds = [None if value is None else value / 1e3 for value in (ttft, tpot)]
        found.append(Served(str(fields["outcome"]), fields["input_length"], cached or 0, *seconds))
    return found


def served_figures(served: Sequence[Served], span_s: float, targets: Targets) -> Figures:
    """Figures of requests that arrived within `span_s`."""
    answered = [one for one in served if one.ttft_s is not None]
    return _figures(
        len(served),
        span_s,
        sum(one.is_good(targets) for one in served),
        sum(one.outcome == "refused" for one in served),
        (sum(one.num_prompt_tokens for one in answered), sum(one.num_cached_tokens for one in answered)),
        [one.ttft_s for one in answered if one.ttft_s is not None],
        [one.tpot_s for one in answered if one.tpot_s is not None],
    )


def _figures(
    count: int,
    span_s: float,
    good: int,
    refused: int,
    tokens: tuple[int, int],
    ttft_s: Sequence[float],
    tpot_s: Sequence[float],
) -> Figures:
    def quantiles(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(np.quantile(values, share)) if values else math.nan for share in QUANTILES)

    return Figures(
        good / max(span_s, 1e-9),
        good / count,
        refused / count,
        tokens[1] / max(1, tokens[0]),
        quantiles(ttft_s),
        quantiles(tpot_s),
    )


def present_split(cluster: MeasuredCluster) -> Split:
    """How the cluster's workers are used now."""
    count = len(cluster.workers)
    if cluster.mode == "auto":
        return Split(AUTO, 0, count)
    if cluster.mode == "collocated":
        return Split(COLLOCATED, 0, count)
    num_prefill = sum(worker.prefills for worker in cluster.workers)
    return Split(STATIC, num_prefill, count - num_prefill)


def splits_of(cluster: MeasuredCluster) -> list[Split]:
    """All ways to use the workers, of two pools at most MOST_SPLITS; the present one is among them."""
    count, present = len(cluster.workers), present_split(cluster)
    numbers = (
        {round(1 + place * (count - 2) / (MOST_SPLITS - 1)) for place in range(MOST_SPLITS)} if count > 1 else set()
    )
    if present.policy == STATIC:
        numbers.add(present.num_prefill)
    pools = [Split(STATIC, number, count - number) for number in sorted(numbers)]
    return [*pools, Split(COLLOCATED, 0, count), Split(AUTO, 0, count)]


def predict(
    trace: Sequence[TraceRequest], cluster: MeasuredCluster, split: Split, targets: Targets, known: Calibration
) -> list[SimRequest]:
    """The trace's requests as the split would serve them. Raises ConfigError where the workers have measured too few
    steps, or are too small."""
    return play(trace, 1.0, split.policy, setup_of(cluster, split, targets, known))


def simulated_figures(requests: Sequence[SimRequest], span_s: float, targets: Targets) -> Figures:
    """Figures of requests that were played, and arrived within `span_s`."""
    served = [request for request in requests if not request.refused]
    return _figures(
        len(requests),
        span_s,
        sum(map(targets.met_by, served)),
        len(requests) - len(served),
        (sum(request.num_prompt_tokens for request in served), sum(request.num_cached_tokens for request in served)),
        [request.ttft_s for request in served],
        [request.tpot_s for request in served if request.num_output_tokens > 1],
    )


def setup_of(cluster: MeasuredCluster, split: Split, targets: Targets, known: Calibration) -> Setup:
    """The simulation of the cluster's workers in a split. Raises ConfigError."""
    specs = [replace(spec, residuals=known.residuals, stretch=known.stretch) for spec in _specs(cluster, split)]
    if split.policy == STATIC:
        roles = [PREFILL] * split.num_prefill + [DECODE] * split.num_decode
        groups = [Group(1, spec, role) for spec, role in zip(specs, roles, strict=True)]
    elif split.policy == COLLOCATED:
        groups = [Group(1, spec, DECODE) for spec in specs]
    else:
        groups = [Group(1, spec) for spec in specs]
    placement = PlacementSettings().config(cluster.max_queued_tokens, cluster.ttft_s, cluster.tpot_s)
    config = TandemConfig(ttft_target_s=cluster.refused_above_s or math.inf, placement=placement)
    return Setup(groups, targets, tandem=config, edge_s=known.edge_s)


def _specs(cluster: MeasuredCluster, split: Split) -> list[WorkerSpec]:
    """Each worker's, those that prefill first. One that gets another role has what both roles have learnt."""
    ordered = sorted(cluster.workers, key=lambda worker: worker.decodes)
    if unknown := [worker.name for worker in ordered if worker.times is None]:
        raise ConfigError(
            f"{', '.join(unknown)} has not measured enough steps yet: send it requests first", field="measured"
        )
    prompts = _middle([worker for worker in ordered if worker.prefills or cluster.mode != "disaggregated"])
    answers = _middle([worker for worker in ordered if worker.decodes])
    both = joined(prompts, answers)
    return [
        _spec(worker, cluster, _times(worker, cluster, split, number, both)) for number, worker in enumerate(ordered)
    ]


def _times(worker: MeasuredWorker, cluster: MeasuredCluster, split: Split, number: int, both: StepTimes) -> StepTimes:
    assert worker.times is not None
    if cluster.mode != "disaggregated":
        return worker.times
    as_now = split.policy == STATIC and (number < split.num_prefill) == worker.prefills
    return worker.times if as_now else both


def _middle(workers: Sequence[MeasuredWorker]) -> StepTimes:
    found = [worker.times for worker in workers if worker.times is not None]
    return found[len(found) // 2]


def _spec(worker: MeasuredWorker, cluster: MeasuredCluster, times: StepTimes) -> WorkerSpec:
    return WorkerSpec(
        times=times,
        num_blocks=worker.num_blocks,
        link=LINK,
        kv_bytes_per_token=worker.kv_bytes_per_token,
        block_size=worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_step_tokens,
        tpot_target_s=cluster.tpot_s,
        plans_ahead=worker.plans_ahead,
    )


LINK = 1e9
"""Bytes/s between two workers of one machine."""


def recorded_trace(path: Path) -> list[TraceRequest]:
    """Raises ConfigError, also for a trace of a single moment."""
    trace = list(read_trace(path))
    if len(trace) < 2 or trace[-1].at_s <= trace[0].at_s:
        raise ConfigError(f"{path} must hold requests of at least two moments", field="trace")
    return trace


def with_targets(cluster: MeasuredCluster, ttft_s: float | None, tpot_s: float | None) -> Targets:
    """The targets that requests are judged by: those given, else the cluster's; raises ConfigError where there are
    none of either."""
    ttft, tpot = ttft_s or cluster.ttft_s, tpot_s or cluster.tpot_s
    if not ttft and not tpot:
        raise ConfigError(
            "the cluster has no targets (targets.ttft_s, targets.tpot_s): give --ttft and --tpot", field="ttft"
        )
    return Targets(ttft or NEVER_S, tpot or NEVER_S)


SHARES = np.linspace(0.02, 0.98, 49)
"""Quantiles at which simulated and measured times are compared."""
LEAST_ANSWERED = 20
"""Answers of several tokens below which a trace's times tell nothing."""
MOST_RESIDUAL = 10.0
STRETCHES = 20
ROUNDS = 8
"""Rounds of simulations, each with what the one before it lacked."""


def every_other_stretch(trace: Sequence[TraceRequest]) -> list[bool]:
    """Whether a request lies in the first, third, … of STRETCHES of equal time: those calibrate, and the others judge,
    so that a machine that becomes slower does so for both."""
    first_s, span_s = trace[0].at_s, trace[-1].at_s - trace[0].at_s
    return [int((request.at_s - first_s) / span_s * STRETCHES) % 2 == 0 for request in trace]


def calibrate(
    trace: Sequence[TraceRequest],
    served: Sequence[Served],
    is_known: Sequence[bool],
    cluster: MeasuredCluster,
    targets: Targets,
) -> Calibration:
    """What those requests tell that `is_known`: simulated with all as the cluster is used now, and compared with what
    they met.

    What their tokens took beside the reported steps, and what their first tokens took beside such steps, both quantile
    by quantile: which request met a busy moment is chance.
    """
    split, known = present_split(cluster), Calibration()
    seen = list(compress(served, is_known))
    paces = [one.tpot_s for one in seen if one.tpot_s is not None]
    firsts = [one.ttft_s for one in seen if one.ttft_s is not None]
    if len(paces) < LEAST_ANSWERED:
        return known
    paces_s, firsts_s = np.quantile(paces, SHARES), np.quantile(firsts, SHARES)
    factors, edge_s = np.ones(len(SHARES)), np.zeros(len(SHARES))
    for _ in range(ROUNDS):
        requests = predict(trace, cluster, split, targets, known)
        played = [one for one in compress(requests, is_known) if not one.refused]
        simulated = [request.tpot_s for request in played if request.num_output_tokens > 1]
        if not simulated:
            return known
        # Slower steps make larger batches, which are slower still: half the way in each round.
        factors = factors * np.sqrt(paces_s / np.maximum(np.quantile(simulated, SHARES), 1e-9))
        factors = np.clip(factors, 1 / MOST_RESIDUAL, MOST_RESIDUAL)
        edge_s = edge_s + (firsts_s - np.quantile([request.ttft_s for request in played], SHARES)) / 2
        edge_s = np.maximum(edge_s, 0.0)
        mean_output = sum(request.num_output_tokens for request in played) / len(played)
        known = Calibration(tuple(factors.tolist()), max(1, round(mean_output)), tuple(edge_s.tolist()))
    return known
