"""A run's progress line; rewritten in place on a terminal, in a log one line now and then."""

from __future__ import annotations

import math
from typing import TextIO

from loadtest.driver.collector import Collector

_LOG_EVERY_S = 10.0
_FIRST_LOG_S = 1.0


class ProgressLine:
    """Plain writes: a rich live display redraws from its own thread and delays the schedule by milliseconds."""

    def __init__(
        self, stream: TextIO, duration_s: float | None, slo_given: bool, title: str = "", log: bool = True
    ) -> None:
        """With `log` False the line is written to terminals only."""
        self._stream = stream
        self._duration_s = duration_s
        self._slo_given = slo_given
        self._title = f"{title}: " if title else ""
        self._in_place = stream.isatty()
        self._next_log_s = _FIRST_LOG_S if log else math.inf
        self._last_len = 0

    def __call__(self, collector: Collector) -> None:
        """Shows the current counts."""
        if self._in_place:
            text = self._text(collector)
            self._stream.write("\r" + text.ljust(self._last_len))
            self._stream.flush()
            self._last_len = len(text)
        elif collector.now_s >= self._next_log_s:
            self._next_log_s = collector.now_s + _LOG_EVERY_S
            self._stream.write(self._text(collector) + "\n")
            self._stream.flush()

    def end(self) -> None:
        """Ends the line, so that later output starts on a new one."""
        if self._in_place and self._last_len:
            self._stream.write("\n")
            self._stream.flush()

    def _text(self, collector: Collector) -> str:
        now_s = collector.now_s
        clock = (
            f"{now_s:.0f} s"
            if self._duration_s is None
            else f"{min(now_s, self._duration_s):.0f}/{self._duration_s:.0f} s"
        )
        counts = f"sent {collector.num_sent}, in flight {collector.num_in_flight}, failed {collector.num_failed}"
        num_ended = collector.num_done + collector.num_failed
        if not self._slo_given:
            return f"{self._title}{clock}: {counts}, done {collector.num_done}"
        share = f"{collector.num_good / num_ended:.0%}" if num_ended else "-"
        rate = collector.num_good / now_s if now_s > 0 else 0.0
        return f"{self._title}{clock}: {counts}, goodput so far {rate:.2f} req/s ({share})"
