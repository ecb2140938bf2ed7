"""Whether a request was good, and what it was lost to where it was not."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from services.router.admission.blocked import Cause
from services.router.dispatch.record import RequestRecord
from services.router.dispatch.states import RequestState
from services.router.views.attribution.time_split import Parts, after_first_token, before_first_token, queue_parts
from services.router.views.timings import ended_at, tpot_s, ttft_s, ttft_split
from shared.errors import DeadlineExceeded, Draining, Overloaded, TransferFailed

_IN_STATE = {
    RequestState.RESERVED: Cause.DECODE_STEP,
    RequestState.PREFILLING: Cause.PREFILL_COMPUTE,
    RequestState.SHIPPING: Cause.TRANSFER,
    RequestState.REASSIGNING: Cause.FAILURE,
    RequestState.RESUMING: Cause.FAILURE,
    RequestState.DECODING: Cause.DECODE_STEP,
}
"""What a request that ran out of time was doing."""
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
    """Of the error that ended it; empty where none did."""
    failure = record.entries[-1].error if record.entries and record.state is RequestState.FAILED else None
    return failure.code if failure is not None else ""


@dataclass(frozen=True, slots=True)
class Targets:
    """Of the router; seconds, 0 = none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


NO_TARGETS = Targets()


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
    """Of a request that waited in the queue, or would have."""
    spent = queue_parts(record, ended_at(record) - record.ask.arrived_at)
    held: Parts = {cause: value for cause, value in spent.items() if cause is not Cause.QUEUEING} or spent
    return max(held, key=held.__getitem__, default=Cause.QUEUEING)


def _doing(record: RequestRecord) -> Cause:
    """What it was doing when it ended."""
    state = next((entry.state for entry in reversed(record.entries) if not entry.state.ended), RequestState.QUEUED)
    return _IN_STATE.get(state) or _waited_for(record)


def _failed_by(record: RequestRecord) -> Cause:
    code = error_code(record)
    if code == TransferFailed.code:
        return Cause.TRANSFER
    return _doing(record) if code == DeadlineExceeded.code else Cause.FAILURE
