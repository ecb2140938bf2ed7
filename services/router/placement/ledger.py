"""Keeps a worker's view true between its reports: the last report, plus what was given to it since.

A commitment counts on top of the reports until they must contain it: at the next report after the worker
acknowledged it, else at the second one, `SETTLE_S` after it was sent. Other routers' work is in the reports alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.router.placement.views import WorkerView
from services.router.placement.work import NO_WORK, Work

SETTLE_S = 0.02
"""Longer than a command's way to a worker and its load report's way back."""


@dataclass(slots=True)
class _Commitment:
    work: Work  # to compute there, none once its first token has come
    num_blocks: int
    sent_s: float | None = None  # None: the command has not left yet
    num_reports: int = 0  # since it was sent
    acknowledged: bool = False


class Ledger:
    """One worker's reports and this router's commitments there; writes the sum into `view`. Times are any clock's."""

    def __init__(self, view: WorkerView) -> None:
        self.view = view
        self._free_blocks = view.num_free_blocks
        self._requests = view.num_requests
        self._queued_tokens = view.num_queued_tokens
        self._own = NO_WORK  # of the open ones
        self._pairs_a_token = 0.0
        self._open: dict[str, _Commitment] = {}
        self._unsettled: dict[str, _Commitment] = {}

    @property
    def num_open(self) -> int:
        """This router's requests there."""
        return len(self._open)

    def commit(self, request_id: str, work: Work, *, num_blocks: int) -> None:
        """The request was placed here: `work` is to be computed for it, and it takes `num_blocks`."""
        self._open[request_id] = self._unsettled[request_id] = _Commitment(work, num_blocks)
        self._own += work
        self._write()

    def sent(self, request_id: str, now_s: float) -> None:
        """The command is on its way to the worker."""
        item = self._open.get(request_id)
        if item is not None:
            item.sent_s = now_s

    def acknowledged(self, request_id: str) -> None:
        """The worker answered about the request: its next report contains it."""
        item = self._open.get(request_id)
        if item is not None:
            item.acknowledged = True

    def computed(self, request_id: str) -> None:
        """The first token came: nothing of the prompt is queued there any more."""
        item = self._open.get(request_id)
        if item is not None:
            self._own -= item.work
            item.work = NO_WORK
            item.acknowledged = True
            self._write()

    def release(self, request_id: str) -> None:
        """The request is over for this worker."""
        item = self._open.pop(request_id, None)
        if item is not None:
            self._own -= item.work
            self._unsettled.pop(request_id, None)
            self._write()

    def report(self, *, num_free_blocks: int, num_requests: int, num_queued_tokens: int, now_s: float) -> None:
        """The worker's own figures as of now; it is no longer taken for full."""
        self._free_blocks = num_free_blocks
        self._requests = num_requests
        self._queued_tokens = num_queued_tokens
        if num_queued_tokens > self._own.tokens:
            self.view.ours_since_s = math.inf
        elif self.view.ours_since_s == math.inf:
            self.view.ours_since_s = now_s
        for request_id, item in list(self._unsettled.items()):
            if item.sent_s is not None and now_s >= item.sent_s:
                item.num_reports += 1
                aged = item.num_reports >= 2 and now_s - item.sent_s >= SETTLE_S
                if item.acknowledged or aged:
                    del self._unsettled[request_id]
        self._write()

    def _write(self) -> None:
        view, fresh = self.view, self._unsettled.values()
        view.num_free_blocks = max(0, self._free_blocks - sum(item.num_blocks for item in fresh))
        view.num_requests = max(len(self._open), self._requests + len(fresh))
        view.num_queued_tokens = self._queued_tokens + sum(item.work.tokens for item in fresh)
        # A worker reports tokens, not prompt lengths: assume prompts like ours, or like our last ones.
        if self._own.tokens:
            self._pairs_a_token = self._own.pairs / self._own.tokens
        view.num_queued_pairs = view.num_queued_tokens * self._pairs_a_token
