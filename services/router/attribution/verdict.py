"""Whether a request was good, and what it was lost to where it was not."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.attribution.causes import Cause
from services.router.attribution.ended import Ended, Outcome
from services.router.attribution.time_split import Parts, after_first_token, before_first_token, queue_parts

_IN_STATE = {
    "reserved": Cause.DECODE_STEP,
    "prefilling": Cause.PREFILL_COMPUTE,
    "shipping": Cause.TRANSFER,
    "resuming": Cause.FAILURE,
    "decoding": Cause.DECODE_STEP,
}
"""What a request that ran out of time was doing."""


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


def judge(ended: Ended, targets: Targets) -> Verdict:
    """A late request is lost to the cause that took most of the time it was late by: of the time to first token where
    that missed its target by more, else of the time behind it."""
    before, after = before_first_token(ended), after_first_token(ended)
    parts = {cause: before.get(cause, 0.0) + after.get(cause, 0.0) for cause in {*before, *after}}
    if ended.outcome is Outcome.REFUSED:
        return Verdict(True, _waited_for(ended), "refused", parts)
    if ended.outcome is Outcome.FAILED:
        return Verdict(True, _failed_by(ended), "failed", parts)
    ttft_target_s = ended.ttft_target_s or targets.ttft_s
    ttft_s, tpot_s = ended.ttft_s, ended.tpot_s
    if ttft_s is None:  # the client left, perhaps for that reason
        waited_s = ended.ended_s - ended.arrived_s
        if not ttft_target_s or waited_s <= ttft_target_s:
            return Verdict(False)
        return Verdict(True, _doing(ended), "ttft", parts)
    late_ttft = ttft_s / ttft_target_s if ttft_target_s else 0.0
    late_tpot = tpot_s / targets.tpot_s if targets.tpot_s and tpot_s is not None else 0.0
    if max(late_ttft, late_tpot) <= 1.0:
        return Verdict(True, None, "", parts)
    missed, spent = ("ttft", before) if late_ttft >= late_tpot else ("tpot", after)
    return Verdict(True, max(spent, key=spent.__getitem__), missed, parts)


def _waited_for(ended: Ended) -> Cause:
    """Of a request that waited in the queue, or would have."""
    spent = queue_parts(ended, ended.ended_s - ended.arrived_s)
    held: Parts = {cause: value for cause, value in spent.items() if cause is not Cause.QUEUEING} or spent
    return max(held, key=held.__getitem__, default=Cause.QUEUEING)


def _doing(ended: Ended) -> Cause:
    return _IN_STATE.get(ended.state) or _waited_for(ended)


def _failed_by(ended: Ended) -> Cause:
    if ended.error == "transfer_failed":
        return Cause.TRANSFER
    return _doing(ended) if ended.error == "deadline_exceeded" else Cause.FAILURE
