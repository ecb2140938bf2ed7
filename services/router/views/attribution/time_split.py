"""A request's time, by cause. Every millisecond is given to one cause: the parts add up to the whole."""

from __future__ import annotations

from services.router.admission.blocked import Cause
from services.router.dispatch.record import RequestRecord
from services.router.views.timings import NO_SPLIT, TtftSplit, delivered_at, ended_at, first_token_at, tpot_s

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
    _add(parts, Cause.TRANSFER, split.prefix_fetch_ms / 1e3)
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
    decoding = min(left, record.decode_ms / 1e3) if record.decode_ms else left
    preempted = min(decoding, record.preempted_ms / 1e3)
    _add(parts, Cause.KV_ROOM, preempted)
    _add(parts, Cause.DECODE_STEP, decoding - preempted)
    _add(parts, Cause.FAILURE if record.num_failures else Cause.ROUTER, left - decoding)
    _add(parts, Cause.CLIENT, delivered_at(record) - ended_at(record))
    return parts


def _add(parts: Parts, cause: Cause, seconds: float) -> None:
    if seconds > 0.0:
        parts[cause] = parts.get(cause, 0.0) + seconds
