"""Causes of lost time, and for how long each kept the head of the router's queue from a start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from services.router.placement.filters import can_hold
from services.router.placement.views import PlacementRequest, WorkerView


class Cause(Enum):
    """One part of the system, as `/status`, `tandem top`, the page and load reports name it."""

    PREFILL_COMPUTE = "prefill_compute"
    """Computing prompts, and waiting for a turn on a prefill worker behind other prompts."""
    DECODE_STEP = "decode_step"
    """Decode steps: their length, the wait for one that ends, and for a slot in a full batch."""
    KV_ROOM = "kv_room"
    """No free KV blocks: waiting for some, or preempted for want of them."""
    TRANSFER = "transfer"
    """KV blocks on their way, as far as nothing else went on meanwhile: a prefix fetched, a hand-off's exposed part;
    and an adapter that is read."""
    QUEUEING = "queueing"
    """The router's queue where no worker lacks room: behind other requests by its order or weights, or no worker was
    there."""
    ROUTER = "router"
    """Between client and workers: reading the prompt, index, placement, and messages on their way."""
    CLIENT = "client"
    """The client takes its answer more slowly than it comes."""
    FAILURE = "failure"
    """A part of the cluster failed, or an earlier attempt did."""


LOOK_AFTER_S = 0.02
"""The reason is looked for at most this often while the queue stands: every report of a worker tries the head again."""

Waits = Mapping[Cause, float]
"""Seconds by reason."""


def blocker(request: PlacementRequest, decodes: Iterable[WorkerView]) -> Cause:
    """What a request that no worker can start waits for."""
    accepting = [view for view in decodes if view.accepting]
    if not accepting:
        return Cause.QUEUEING
    if any(can_hold(view, request) for view in accepting):
        return Cause.PREFILL_COMPUTE
    has_slot = any(view.num_requests < view.max_num_seqs for view in accepting)
    return Cause.KV_ROOM if has_slot else Cause.DECODE_STEP


class BlockedClock:
    """Adds up for how long the queue's head was held, by reason. Times are of one clock, seconds, in order."""

    def __init__(self) -> None:
        self.cause: Cause | None = None
        """Why the head waits now; None: the queue is empty or its head can start."""
        self._since_s = 0.0
        self._looked_s = float("-inf")
        self._sums: dict[Cause, float] = {}

    def is_due(self, now_s: float) -> bool:
        """Whether the reason should be looked for again."""
        return self.cause is None or now_s - self._looked_s >= LOOK_AFTER_S

    def hold(self, cause: Cause, now_s: float) -> None:
        """The head waits for `cause` from now on."""
        self._settle(now_s)
        self.cause, self._looked_s = cause, now_s

    def release(self, now_s: float) -> None:
        """The head was started, or the queue is empty."""
        if self.cause is not None:
            self._settle(now_s)
            self.cause = None

    def read(self, now_s: float) -> Waits:
        """Sums since the clock was made, those of the present reason included."""
        self._settle(now_s)
        return dict(self._sums)

    def _settle(self, now_s: float) -> None:
        if self.cause is not None:
            self._sums[self.cause] = self._sums.get(self.cause, 0.0) + max(0.0, now_s - self._since_s)
        self._since_s = now_s


def between(before: Waits, after: Waits) -> Waits:
    """What was added to a clock's sums between two readings."""
    return {cause: value - before.get(cause, 0.0) for cause, value in after.items() if value > before.get(cause, 0.0)}
