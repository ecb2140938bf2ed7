"""The schedule of one who knows the whole trace: the yardstick of the planner's GPU hours.

For each window of time: the work that its requests bring to a prefill worker if every prefix of the trace is a hit, and
the blocks that their answers hold on decode workers; times a margin, rounded up to whole workers, ready when the window
begins. Of several margins for each pool the cheapest whose simulation attains the goal is taken: no knowledge of the
future saves less than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.simulator.fleet import WorkerSpec
from loadtest.simulator.planning.run import ElasticOutcome, ElasticSetup, scheduled
from loadtest.workloads.trace import BLOCK_LEN, TraceRequest
from services.planner.policy.budget import Pair


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """The chosen schedule."""

    outcome: ElasticOutcome
    prefill_margin: float
    decode_margin: float


@dataclass(slots=True)
class _Load:
    prefill_s: float = 0.0
    block_s: float = 0.0
    sequence_s: float = 0.0


def loads(
    trace: Sequence[TraceRequest], spec: WorkerSpec, window_s: float, tpot_s: float, sequences: float
) -> list[tuple[float, float]]:
    """(prefill workers kept busy, decode workers filled) in each window of the trace. A decode worker is full when its
    blocks are in use, or with that many sequences; an answer's tokens take `tpot_s` each."""
    windows = [_Load() for _ in range(int(trace[-1].at_s // window_s) + 1)]
    known: set[int] = set()
    for request in trace:
        held = 0
        for run in request.hash_ids:
            if run not in known:
                break
            held += BLOCK_LEN
        known.update(request.hash_ids)
        held = min(held, request.num_prompt_tokens - 1)
        window = windows[int(request.at_s // window_s)]
        window.prefill_s += spec.times.chunk_s(request.num_prompt_tokens - held, held)
        blocks = -(-(request.num_prompt_tokens + request.num_output_tokens) // spec.block_size)
        _hold(windows, window_s, request.at_s, request.num_output_tokens * tpot_s, blocks)
    return [
        (one.prefill_s / window_s, max(one.block_s / spec.num_blocks, one.sequence_s / sequences) / window_s)
        for one in windows
    ]


def _hold(windows: list[_Load], window_s: float, from_s: float, for_s: float, blocks: int) -> None:
    end_s = from_s + for_s
    while from_s < end_s and (number := int(from_s // window_s)) < len(windows):
        until_s = min(end_s, (number + 1) * window_s)
        windows[number].block_s += (until_s - from_s) * blocks
        windows[number].sequence_s += until_s - from_s
        from_s = until_s


def schedule(
    windows: Sequence[tuple[float, float]], window_s: float, prefill_margin: float, decode_margin: float
) -> list[tuple[float, Pair]]:
    """Workers for each window's load times the margins; only the changes are listed."""
    plan: list[tuple[float, Pair]] = []
    for number, (prefill, decode) in enumerate(windows):
        pair = Pair(max(1, math.ceil(prefill * prefill_margin)), max(1, math.ceil(decode * decode_margin)))
        if not plan or plan[-1][1] != pair:
            plan.append((number * window_s, pair))
    return plan


def cheapest(
    trace: Sequence[TraceRequest],
    setup: ElasticSetup,
    attainment: float,
    margins: Sequence[tuple[float, float]],
    sequences: float,
    window_s: float,
) -> Iterator[Clairvoyant]:
    """Schedules that attain the goal, each cheaper than the one before; the last one is the yardstick."""
    best = math.inf
    tried: set[tuple[tuple[float, Pair], ...]] = set()
    windows = loads(trace, setup.worker, window_s, setup.targets.tpot_s / 2, sequences)
    for prefill_margin, decode_margin in margins:
        plan = schedule(windows, window_s, prefill_margin, decode_margin)
        if tuple(plan) in tried:
            continue
        tried.add(tuple(plan))
        outcome = scheduled(trace, setup, plan)
        if outcome.attainment >= attainment and outcome.gpu_hours < best:
            best = outcome.gpu_hours
            yield Clairvoyant(outcome, prefill_margin, decode_margin)
