"""What a request's time is spent on, and what it may be lost to."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """One part of the system, as `/status`, `tandem top`, the page and load reports name it."""

    PREFILL_COMPUTE = "prefill_compute"
    """Computing prompts, and waiting for a turn on a prefill worker behind other prompts."""
    DECODE_STEP = "decode_step"
    """Decode steps: their length, the wait for one that ends, and for a slot in a full batch."""
    KV_ROOM = "kv_room"
    """No free KV blocks: waiting for some, or preempted for want of them."""
    TRANSFER = "transfer"
    """KV blocks on their way, as far as nothing else went on meanwhile: a prefix fetched, a hand-off's exposed part."""
    QUEUEING = "queueing"
    """The router's queue where no worker lacks room: behind other requests by its order or weights, or no worker was
    there."""
    ROUTER = "router"
    """Between client and workers: reading the prompt, index, placement, and messages on their way."""
    CLIENT = "client"
    """The client takes its answer more slowly than it comes."""
    FAILURE = "failure"
    """A part of the cluster failed, or an earlier attempt did."""
