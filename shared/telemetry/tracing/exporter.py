"""Finished spans on their way out: a bounded queue, sent about once a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.tasks import end_task
from shared.telemetry.tracing import otlp
from shared.telemetry.tracing.collector import Collector, CollectorError
from shared.telemetry.tracing.span import Attributes, Span

logger = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 8192
"""About 4 MiB. What comes while so many wait is dropped, and counted."""
MAX_BATCH_SPANS = 512
MAX_SPANS_IN_A_ROW = 64
"""Built and encoded before other tasks have their turn: about 0.3 ms. One trace at a time costs more: with each turn of
the loop the processor's caches lose the code."""
INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 3.0
"""For what still waits when the process ends."""


@dataclass(slots=True)
class ExportCounters:
    """Spans since start."""

    num_exported: int = 0
    num_dropped_full: int = 0
    """Too many waited. A trace that was not built counts as many as it may have."""
    num_dropped_refused: int = 0
    """The collector did not take them."""


class SpanExporter:
    """Runs on the event loop, which it never holds for longer than a few traces take to encode. `add` never blocks;
    `close()` sends what still waits and is idempotent."""

    def __init__(self, collector: Collector, resource: Attributes) -> None:
        """Owns the collector. `resource`: attributes of this process."""
        self.counters = ExportCounters()
        self._collector = collector
        self._resource = resource
        self._waiting: deque[tuple[int, int, Callable[[], Sequence[Span]]]] = deque()
        self._num_waiting = 0
        self._answers = True
        self._wake = asyncio.Event()  # a batch waits, or the end has come
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to send."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="span exporter")

    def add(self, trace_id: int, spans: Sequence[Span]) -> None:
        """Queues spans of one trace."""
        self.add_later(trace_id, len(spans), lambda: spans)

    def add_later(self, trace_id: int, num_spans: int, build: Callable[[], Sequence[Span]]) -> None:
        """Queues spans of one trace, `num_spans` at most, that are built when their turn comes."""
        if self._num_waiting + num_spans > MAX_QUEUED_SPANS:
            self.counters.num_dropped_full += num_spans
            return
        self._waiting.append((trace_id, num_spans, build))
        self._num_waiting += num_spans
        if self._num_waiting >= MAX_BATCH_SPANS:
            self._wake.set()

    async def close(self) -> None:
        """Sends what waits, within CLOSE_TIMEOUT_S."""
        task, self._task = self._task, None
        if task is not None:
            self._closing = True
            self._wake.set()
            await asyncio.wait((task,), timeout=CLOSE_TIMEOUT_S)
            await end_task(task)
            self.counters.num_dropped_refused += self._num_waiting
            self._waiting.clear()
            self._num_waiting = 0
        await self._collector.close()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), INTERVAL_S)
            self._wake.clear()
            while self._waiting and (self._answers or not self._closing):
                try:
                    await self._send_batch()
                except Exception:  # a bug costs these spans, not those to come
                    logger.exception("spans could not be exported")
            if self._closing:
                return

    async def _send_batch(self) -> None:
        request, num_spans, num_in_a_row = otlp.empty_request(self._resource), 0, 0
        offset_s = time.time() - time.perf_counter()
        while self._waiting and num_spans < MAX_BATCH_SPANS:
            trace_id, most_spans, build = self._waiting.popleft()
            self._num_waiting -= most_spans
            try:
                spans = build()
            except Exception:  # a bug costs this trace, not the others of the request
                logger.exception("a trace could not be built")
                self.counters.num_dropped_refused += most_spans
                continue
            num_spans += len(spans)
            otlp.add_spans(request, trace_id, spans, offset_s)
            num_in_a_row += len(spans)
            if num_in_a_row >= MAX_SPANS_IN_A_ROW:
                num_in_a_row = 0
                await asyncio.sleep(0)  # tokens go first
        try:
            await self._collector.export(request.SerializeToString())
        except CollectorError as error:
            self.counters.num_dropped_refused += num_spans
            if self._answers:
                logger.warning("traces are dropped, the collector does not take them: %s", error)
            self._answers = False
        except BaseException:  # cancelled at the end
            self.counters.num_dropped_refused += num_spans
            raise
        else:
            self.counters.num_exported += num_spans
            if not self._answers:
                logger.info("the collector takes traces again")
            self._answers = True
