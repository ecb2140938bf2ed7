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
    """One worker's reports and this router's commitments there; writes the sum into `view`. Any clock, in seconds.

    The view holds the last report and the sums over the unsettled commitments, which change by one at a time.
    """

    def __init__(self, view: WorkerView) -> None:
        self.view = view
        self._free_blocks = view.num_free_blocks  # by the report, less those of the unsettled commitments
        self._requests = view.num_requests  # by the report
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
        item = self._open[request_id] = self._unsettled[request_id] = _Commitment(work, num_blocks, num_answer_tokens)
        self._own_tokens += work.tokens
        self._count(item, 1)
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
            if request_id in self._unsettled:
                self.view.num_queued_tokens -= item.work.tokens
                self.view.num_queued_pairs -= item.work.pairs
            item.work = NO_WORK
            item.acknowledged = True

    def release(self, request_id: str) -> None:
        """The request has ended on this worker."""
        item = self._open.pop(request_id, None)
        if item is not None:
            self._own_tokens -= item.work.tokens
            if self._unsettled.pop(request_id, None) is not None:
                self._count(item, -1)
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
        num_promised: int = 0,
        num_promised_tokens: int = 0,
    ) -> None:
        """The worker's current figures; a worker marked full is considered again. `num_decoding`, and their tokens:
        answers that run there; `num_promised`: that are to."""
        view = self.view
        view.reported_s = now_s
        self._free_blocks, self._requests = num_free_blocks, num_requests
        view.num_queued_tokens, view.num_queued_pairs = queued.tokens, queued.pairs
        view.num_decoding = num_decoding + num_promised
        view.num_context_tokens = num_context_tokens + num_promised_tokens
        view.num_promised, view.num_promised_tokens = num_promised, num_promised_tokens
        if queued.tokens > self._own_tokens:
            view.exclusive_since_s = math.inf
        elif view.exclusive_since_s == math.inf:
            view.exclusive_since_s = now_s
        for request_id, item in list(self._unsettled.items()):
            if item.sent_s is not None and now_s >= item.sent_s:
                item.num_reports += 1
                aged = item.num_reports >= 2 and now_s - item.sent_s >= SETTLE_S
                if item.acknowledged or aged:
                    del self._unsettled[request_id]
                    continue
            self._count(item, 1)
        self._write()

    def _count(self, item: _Commitment, sign: int) -> None:
        """Adds an unsettled commitment to the sums, or takes it out of them. All are whole numbers or halves, so that
        nothing is left over."""
        view = self.view
        self._free_blocks -= sign * item.num_blocks
        view.num_queued_tokens += sign * item.work.tokens
        view.num_queued_pairs += sign * item.work.pairs
        if item.num_answer_tokens:
            view.num_decoding += sign
            view.num_context_tokens += sign * item.num_answer_tokens
            view.num_promised += sign
            view.num_promised_tokens += sign * item.num_answer_tokens

    def _write(self) -> None:
        self.view.num_free_blocks = max(0, self._free_blocks)
        self.view.num_requests = max(len(self._open), self._requests + len(self._unsettled))
