"""A request's time, by cause. Every millisecond is given to one cause: the parts add up to the whole."""

from __future__ import annotations

from services.router.attribution.causes import Cause
from services.router.attribution.ended import Ended

Parts = dict[Cause, float]
"""Seconds by cause."""


def before_first_token(ended: Ended) -> Parts:
    """The time to the first token; empty where none came."""
    split, whole = ended.summary.ttft, ended.ttft_s
    if whole is None:
        return {}
    parts = queue_parts(ended, split.queue_ms / 1e3)
    reserving = min(ended.summary.reserve_on_worker_ms, split.reserve_ms) / 1e3
    _add(parts, Cause.DECODE_STEP, reserving)
    _add(parts, Cause.TRANSFER, split.prefix_fetch_ms / 1e3)
    _add(parts, Cause.PREFILL_COMPUTE, (split.prefill_queue_ms + split.prefill_compute_ms) / 1e3)
    # What no worker saw. Earlier attempts lie between arrival and the last look-up: those that failed, or that a worker
    # refused for want of room.
    rest = max(0.0, whole - sum(parts.values()))
    between_attempts = split.placement_ms / 1e3 if ended.num_attempts > 1 else 0.0
    _add(parts, Cause.FAILURE if ended.num_failures else Cause.KV_ROOM, min(rest, between_attempts))
    _add(parts, Cause.ROUTER, max(0.0, rest - between_attempts))
    return parts


def queue_parts(ended: Ended, queue_s: float) -> Parts:
    """Time in the router's queue, by what its head waited for."""
    held = sum(ended.waits.values())
    scale = min(1.0, queue_s / held) if held > 0.0 else 0.0
    parts = {cause: spent for cause, value in ended.waits.items() if (spent := value * scale) > 0.0}
    _add(parts, Cause.QUEUEING, queue_s - held * scale)
    return parts


def after_first_token(ended: Ended) -> Parts:
    """From the first token until the client had taken the last one; empty below two tokens."""
    if ended.tpot_s is None:
        return {}
    summary = ended.summary
    parts: Parts = {}
    left = max(0.0, ended.last_token_s - ended.first_token_s)
    shipping = min(left, summary.ttft.ship_exposed_ms / 1e3)
    _add(parts, Cause.TRANSFER, shipping)
    left -= shipping
    # An answer that was cut has no word of its decode worker about it: it was decoding.
    decoding = min(left, summary.decode_ms / 1e3) if summary.decode_ms else left
    preempted = min(decoding, summary.preempted_ms / 1e3)
    _add(parts, Cause.KV_ROOM, preempted)
    _add(parts, Cause.DECODE_STEP, decoding - preempted)
    _add(parts, Cause.FAILURE if ended.num_failures else Cause.ROUTER, left - decoding)
    _add(parts, Cause.CLIENT, ended.delivered_s - ended.last_token_s)
    return parts


def _add(parts: Parts, cause: Cause, seconds: float) -> None:
    if seconds > 0.0:
        parts[cause] = parts.get(cause, 0.0) + seconds
