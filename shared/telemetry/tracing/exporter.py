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
from shared.telemetry.tracing.otlp import encoded_request, encoded_spans
from shared.telemetry.tracing.otlp_connection import Collector, CollectorError
from shared.telemetry.tracing.span import Attributes, Span

logger = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 8192
"""Most spans that wait, about 1 MiB. Further ones are dropped, and counted."""
MAX_BATCH_SPANS = 512
MAX_SPANS_IN_A_ROW = 64
"""Spans of a batch: built and encoded as soon as this number waits, in a turn of the loop of their own: about 0.2 ms.
One trace at a time costs more: with each turn of the loop the processor's caches lose the code. With more of them the
garbage collector would look at each trace's objects again and again before they are bytes."""
INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 3.0
"""Seconds for spans that still wait when the process ends."""


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
        self._traces: deque[tuple[int, int, Callable[[], Sequence[Span]]]] = deque()
        """Not encoded yet: id, most spans, what builds them."""
        self._num_in_traces = 0
        self._encoded: deque[tuple[int, bytes]] = deque()
        """Their number, and spans as a request has them."""
        self._num_encoded = 0
        self._answers = True
        self._wake = asyncio.Event()  # a batch waits, or the end has come
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs

    def start(self) -> None:
        """Begins to send."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._run(), name="span exporter")

    def add(self, trace_id: int, spans: Sequence[Span]) -> None:
        """Queues spans of one trace."""
        self.add_later(trace_id, len(spans), lambda: spans)

    def add_later(self, trace_id: int, num_spans: int, build: Callable[[], Sequence[Span]]) -> None:
        """Queues spans of one trace, `num_spans` at most, that are built when their turn comes."""
        before = self._num_in_traces
        if before + self._num_encoded + num_spans > MAX_QUEUED_SPANS:
            self.counters.num_dropped_full += num_spans
            return
        self._traces.append((trace_id, num_spans, build))
        self._num_in_traces = before + num_spans
        if self._num_in_traces >= MAX_SPANS_IN_A_ROW > before and self._loop is not None:
            self._loop.call_soon(self._encode_row)

    async def close(self) -> None:
        """Sends what waits, within CLOSE_TIMEOUT_S."""
        task, self._task, self._loop = self._task, None, None
        if task is not None:
            self._closing = True
            self._wake.set()
            await asyncio.wait((task,), timeout=CLOSE_TIMEOUT_S)
            await end_task(task)
            self.counters.num_dropped_refused += self._num_encoded + self._num_in_traces
            self._encoded.clear()
            self._traces.clear()
            self._num_encoded = self._num_in_traces = 0
        await self._collector.close()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), INTERVAL_S)
            self._wake.clear()
            while self._traces:
                self._encode_row()
                await asyncio.sleep(0)  # tokens go first
            while self._encoded and (self._answers or not self._closing):
                try:
                    await self._send_batch()
                except Exception:  # a bug costs these spans, not those to come
                    logger.exception("spans could not be exported")
            if self._closing:
                return

    def _encode_row(self) -> None:
        """Turns waiting traces into bytes, MAX_SPANS_IN_A_ROW or what there is."""
        offset_s = time.time() - time.perf_counter()
        num_before = self._num_encoded
        while self._traces and self._num_encoded - num_before < MAX_SPANS_IN_A_ROW:
            trace_id, most_spans, build = self._traces.popleft()
            self._num_in_traces -= most_spans
            try:
                spans = build()
                encoded = encoded_spans(trace_id, spans, offset_s)
            except Exception:  # a bug costs this trace, not the others
                logger.exception("a trace could not be built")
                self.counters.num_dropped_refused += most_spans
                continue
            self._encoded.append((len(spans), encoded))
            self._num_encoded += len(spans)
        if self._num_encoded >= MAX_BATCH_SPANS:
            self._wake.set()
        if self._num_in_traces >= MAX_SPANS_IN_A_ROW and self._loop is not None:
            self._loop.call_soon(self._encode_row)

    async def _send_batch(self) -> None:
        batch: list[bytes] = []
        num_spans = 0
        while self._encoded and (not batch or num_spans + self._encoded[0][0] <= MAX_BATCH_SPANS):
            number, encoded = self._encoded.popleft()
            num_spans += number
            batch.append(encoded)
        self._num_encoded -= num_spans
        try:
            await self._collector.export(encoded_request(self._resource, batch))
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
