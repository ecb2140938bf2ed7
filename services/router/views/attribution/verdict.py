"""Whether a request was good, and what it was lost to where it was not."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from services.router.admission.blocked import Cause
from services.router.dispatch.record import RequestRecord, RequestState
from services.router.views.timings import (
    NO_SPLIT,
    TtftSplit,
    decoded_elsewhere_s,
    delivered_at,
    ended_at,
    first_token_at,
    tpot_s,
    ttft_s,
    ttft_split,
)
from shared.errors import DeadlineExceeded, Draining, Overloaded, TransferFailed

Parts = dict[Cause, float]
"""Seconds by cause."""


def before_first_token(record: RequestRecord, split: TtftSplit) -> Parts:
    """The time to the first token; empty where none came."""
    if split is NO_SPLIT:
        return {}
    whole = split.ttft_ms / 1e3
    parts = queue_parts(record, split.queue_ms / 1e3)
    reserving = min(record.reserve_on_worker_ms, split.reserve_ms) / 1e3
    _add(parts, Cause.DECODE_STEP, reserving)
    _add(parts, Cause.TRANSFER, (split.prefix_fetch_ms + split.adapter_ms) / 1e3)
    _add(parts, Cause.PREFILL_COMPUTE, (split.prefill_queue_ms + split.prefill_compute_ms) / 1e3)
    # What no worker saw. Earlier attempts lie between arrival and the last look-up: those that failed, or that a worker
    # refused for want of room.
    rest = max(0.0, whole - sum(parts.values()))
    between_attempts = split.placement_ms / 1e3 if len(record.choices) > 1 else 0.0
    _add(parts, Cause.FAILURE if record.num_failures else Cause.KV_ROOM, min(rest, between_attempts))
    _add(parts, Cause.ROUTER, max(0.0, rest - between_attempts))
    return parts


def queue_parts(record: RequestRecord, queue_s: float) -> Parts:
    """Time in the router's queue, by what its head waited for."""
    held = sum(record.waits.values())
    scale = min(1.0, queue_s / held) if held > 0.0 else 0.0
    parts = {cause: spent for cause, value in record.waits.items() if (spent := value * scale) > 0.0}
    _add(parts, Cause.QUEUEING, queue_s - held * scale)
    return parts


def after_first_token(record: RequestRecord, split: TtftSplit) -> Parts:
    """From the first token until the client had taken the last one; empty below two tokens."""
    if tpot_s(record) is None:
        return {}
    parts: Parts = {}
    left = max(0.0, ended_at(record) - first_token_at(record))
    shipping = min(left, split.ship_exposed_ms / 1e3)
    _add(parts, Cause.TRANSFER, shipping)
    left -= shipping
    # Of an answer that was cut its decode worker reports no times: it was decoding.
    decoding = min(left, decoded_elsewhere_s(record) + record.decode_ms / 1e3) if record.decode_ms else left
    preempted = min(decoding, record.preempted_ms / 1e3)
    _add(parts, Cause.KV_ROOM, preempted)
    _add(parts, Cause.DECODE_STEP, decoding - preempted)
    _add(parts, Cause.FAILURE if record.num_failures else Cause.ROUTER, left - decoding)
    _add(parts, Cause.CLIENT, delivered_at(record) - ended_at(record))
    return parts


def _add(parts: Parts, cause: Cause, seconds: float) -> None:
    if seconds > 0.0:
        parts[cause] = parts.get(cause, 0.0) + seconds


_IN_STATE = {
    RequestState.RESERVED: Cause.DECODE_STEP,
    RequestState.PREFILLING: Cause.PREFILL_COMPUTE,
    RequestState.OVERTAKEN: Cause.PREFILL_COMPUTE,
    RequestState.SHIPPING: Cause.TRANSFER,
    RequestState.REASSIGNING: Cause.FAILURE,
    RequestState.REASSIGNING_HELD: Cause.FAILURE,
    RequestState.RESUMING: Cause.FAILURE,
    RequestState.RESUMING_HELD: Cause.FAILURE,
    RequestState.DECODING: Cause.DECODE_STEP,
    RequestState.COPYING: Cause.DECODE_STEP,
    RequestState.CLOSING_UP: Cause.DECODE_STEP,
    RequestState.REPEATING: Cause.TRANSFER,
}
"""Cause of a request that ran out of time, by the state that it was in."""
_REFUSALS = (Overloaded.code, Draining.code)


class Outcome(Enum):
    """How a request ended for the router's core."""

    FINISHED = "finished"
    CUT = "cut"
    """The client left, or a stop string ended the answer."""
    REFUSED = "refused"
    """For want of capacity."""
    FAILED = "failed"


def outcome(record: RequestRecord) -> Outcome | None:
    """None for a request that runs, and for one whose end says nothing of the cluster: refused for what it asks, or
    continued on another call."""
    state = record.state
    if state is RequestState.FINISHED:
        return Outcome.FINISHED
    if state is RequestState.CANCELLED:
        return Outcome.CUT
    if state is not RequestState.FAILED:
        return None
    if error_code(record) in _REFUSALS:
        return Outcome.REFUSED
    failure = record.entries[-1].error
    return Outcome.FAILED if failure is None or failure.http_status >= 500 else None


def error_code(record: RequestRecord) -> str:
    """The code of the error that ended the request; empty where none did."""
    failure = record.entries[-1].error if record.entries and record.state is RequestState.FAILED else None
    return failure.code if failure is not None else ""


@dataclass(frozen=True, slots=True)
class Targets:
    """The router's targets; seconds, 0 = none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One request, judged."""

    counts: bool
    """False: it says nothing of the cluster, such as a client that left before its first token was due."""
    lost_to: Cause | None = None
    """None: it met its targets."""
    missed: str = ""
    """ttft, tpot, refused or failed; empty where it is good."""
    parts: Parts = field(default_factory=dict)
    """All of its time, by cause."""
    ttft_s: float | None = None
    tpot_s: float | None = None


def judge(record: RequestRecord, targets: Targets) -> Verdict:
    """A late request is lost to the cause that took most of the time it was late by: of the time to first token where
    that missed its target by more, else of the time behind it."""
    split = ttft_split(record)
    before, after = before_first_token(record, split), after_first_token(record, split)
    parts = {cause: before.get(cause, 0.0) + after.get(cause, 0.0) for cause in {*before, *after}}
    ttft, tpot = ttft_s(record), tpot_s(record)
    ended = outcome(record)
    if ended is Outcome.REFUSED:
        return Verdict(True, _waited_for(record), "refused", parts, ttft, tpot)
    if ended is Outcome.FAILED:
        return Verdict(True, _failed_by(record), "failed", parts, ttft, tpot)
    ttft_target_s = record.ask.ttft_timeout_s or targets.ttft_s
    if ttft is None:  # the client left, perhaps for that reason
        waited_s = ended_at(record) - record.ask.arrived_at
        if not ttft_target_s or waited_s <= ttft_target_s:
            return Verdict(False)
        return Verdict(True, _doing(record), "ttft", parts)
    late_ttft = ttft / ttft_target_s if ttft_target_s else 0.0
    late_tpot = tpot / targets.tpot_s if targets.tpot_s and tpot is not None else 0.0
    if max(late_ttft, late_tpot) <= 1.0:
        return Verdict(True, None, "", parts, ttft, tpot)
    missed, spent = ("ttft", before) if late_ttft >= late_tpot else ("tpot", after)
    return Verdict(True, max(spent, key=spent.__getitem__), missed, parts, ttft, tpot)


def _waited_for(record: RequestRecord) -> Cause:
    """The cause of a wait in the queue, also of a request that was refused instead."""
    spent = queue_parts(record, ended_at(record) - record.ask.arrived_at)
    held: Parts = {cause: value for cause, value in spent.items() if cause is not Cause.QUEUEING} or spent
    return max(held, key=held.__getitem__, default=Cause.QUEUEING)


def _doing(record: RequestRecord) -> Cause:
    """The cause of the time that a request was spending when it ended."""
    state = next((entry.state for entry in reversed(record.entries) if not entry.state.ended), RequestState.QUEUED)
    return _IN_STATE.get(state) or _waited_for(record)


def _failed_by(record: RequestRecord) -> Cause:
    code = error_code(record)
    if code == TransferFailed.code:
        return Cause.TRANSFER
    return _doing(record) if code == DeadlineExceeded.code else Cause.FAILURE
