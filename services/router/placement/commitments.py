"""Keeps the view of a worker current between its reports: the last report plus this router's commitments since.

A commitment counts on top of the reports until they must contain it: from the next report after the worker
acknowledged it, or else from the second report that comes `SETTLE_S` or more after it was sent. Other routers' work
appears in the reports only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.router.placement.views import NO_WORK, Work, WorkerView

SETTLE_S = 0.02
"""Longer than a command takes to a worker plus its load report back. Seconds."""


@dataclass(slots=True)
class _Commitment:
    work: Work  # to compute there; none after its first token
    num_blocks: int
    num_answer_tokens: int  # of the answer that is to run there; 0 = it runs elsewhere
    sent_s: float | None = None  # None: the command has not left yet
    num_reports: int = 0  # since it was sent
    acknowledged: bool = False


class Ledger:
    """One worker's reports and this router's commitments there; writes the sum into `view`. Any clock, in seconds."""

    def __init__(self, view: WorkerView) -> None:
        self.view = view
        self._free_blocks = view.num_free_blocks
        self._requests = view.num_requests
        self._queued = view.queued
        self._decoding = view.num_decoding
        self._context_tokens = view.num_context_tokens
        self._own_tokens = 0  # to compute, of the open commitments
        self._open: dict[str, _Commitment] = {}
        self._unsettled: dict[str, _Commitment] = {}

    @property
    def num_open(self) -> int:
        """Number of this router's requests there."""
        return len(self._open)

    def commit(self, request_id: str, work: Work, *, num_blocks: int, num_answer_tokens: int = 0) -> None:
        """The request was placed here: `work` is to be computed for it, and it takes `num_blocks`; its answer runs here
        behind `num_answer_tokens` tokens, or elsewhere where that is 0."""
        self._open[request_id] = self._unsettled[request_id] = _Commitment(work, num_blocks, num_answer_tokens)
        self._own_tokens += work.tokens
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
            self._own_tokens -= item.work.tokens
            item.work = NO_WORK
            item.acknowledged = True
            self._write()

    def release(self, request_id: str) -> None:
        """The request has ended on this worker."""
        item = self._open.pop(request_id, None)
        if item is not None:
            self._own_tokens -= item.work.tokens
            self._unsettled.pop(request_id, None)
            self._write()

    def report(
        self,
        *,
        num_free_blocks: int,
        num_requests: int,
        queued: Work,
        now_s: float,
        num_decoding: int = 0,
        num_context_tokens: int = 0,
    ) -> None:
        """The worker's current figures; a worker marked full is considered again. `num_decoding`, and their tokens:
        answers that run there or are to."""
        self._free_blocks = num_free_blocks
        self._requests = num_requests
        self._queued = queued
        self._decoding = num_decoding
        self._context_tokens = num_context_tokens
        if queued.tokens > self._own_tokens:
            self.view.exclusive_since_s = math.inf
        elif self.view.exclusive_since_s == math.inf:
            self.view.exclusive_since_s = now_s
        for request_id, item in list(self._unsettled.items()):
            if item.sent_s is not None and now_s >= item.sent_s:
                item.num_reports += 1
                aged = item.num_reports >= 2 and now_s - item.sent_s >= SETTLE_S
                if item.acknowledged or aged:
                    del self._unsettled[request_id]
        self._write()

    def _write(self) -> None:
        view, num_blocks, num_answers, num_tokens = self.view, 0, 0, 0
        queued_tokens, queued_pairs = self._queued.tokens, self._queued.pairs
        for item in self._unsettled.values():
            num_blocks += item.num_blocks
            queued_tokens += item.work.tokens
            queued_pairs += item.work.pairs
            num_answers += item.num_answer_tokens > 0
            num_tokens += item.num_answer_tokens
        view.num_free_blocks = max(0, self._free_blocks - num_blocks)
        view.num_requests = max(len(self._open), self._requests + len(self._unsettled))
        view.num_queued_tokens, view.num_queued_pairs = queued_tokens, queued_pairs
        view.num_decoding = self._decoding + num_answers
        view.num_context_tokens = self._context_tokens + num_tokens
