"""When a hand-off is stalled: what its sender has sent does not arrive, although both sides are alive. Pure policy."""

from __future__ import annotations

REPORT_EVERY_S = 0.5
"""A receiver reports this often while nothing arrives."""
STALLED_S = 3.0
"""A hand-off without progress for this long is stalled; so a network must carry one block in less."""
_MIN_REPORTS = 4
"""At least this many reports without progress in between: a side that was held up for long sends or reads one alone."""


class StallWatch:
    """Judges one hand-off on its sender's side by its receiver's reports.

    The time that a sender computes does not count: only messages that it had sent by one report, and that have not
    arrived by later ones, are missing. Nor does the time in which the receiver takes other hand-offs' blocks from the
    same sender, since these share a connection.
    """

    def __init__(self) -> None:
        self._progress: tuple[int, int] | None = None
        self._num_sent = 0
        self._num_reports = 0
        self._since_s = 0.0

    def is_stalled(self, num_arrived: int, num_sent: int, num_taken: int, now_s: float) -> bool:
        """Takes a report. `num_arrived` and `num_sent`: of the hand-off's blocks and notes; `num_taken`: blocks of all
        hand-offs to this receiver whose sending is complete; `now_s` by the sender's clock."""
        if self._progress == (num_arrived, num_taken) and self._num_sent > num_arrived:
            self._num_reports += 1
        else:
            self._progress, self._num_sent = (num_arrived, num_taken), num_sent
            self._num_reports, self._since_s = 1, now_s
        return self._num_reports >= _MIN_REPORTS and now_s - self._since_s >= STALLED_S
