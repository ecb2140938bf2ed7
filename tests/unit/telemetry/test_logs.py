"""Log lines, and the trace that they belong to."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

from shared.errors import InvalidRequest, NumericalFault, Overloaded, WorkerLost
from shared.telemetry.logs import JsonFormatter, failure_level, request_log
from shared.telemetry.trace_context import (
    TraceContext,
    current_trace_id,
    new_span_id,
    new_trace_id,
    set_current_trace_id,
    trace_id_of,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collecting(logging.Handler):
    """Keeps what a formatter makes of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("tandem-test"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def last(self) -> dict[str, Any]:
        record = json.loads(self.lines[-1])
        assert isinstance(record, dict)
        return record


@pytest.fixture
def handler() -> Collecting:
    return Collecting()


@pytest.fixture
def logger(handler: Collecting) -> logging.Logger:
    logger = logging.Logger("part")
    logger.addHandler(handler)
    return logger


def test_a_record_is_one_line_with_time_in_utc(logger: logging.Logger, handler: Collecting) -> None:
    logger.warning("two\nlines of %s", "größe")
    record = handler.last
    assert "\n" not in handler.lines[0]
    when = datetime.fromisoformat(record.pop("time"))
    assert when.utcoffset() == timedelta(0)
    assert abs((datetime.now(when.tzinfo) - when).total_seconds()) < 60
    assert record == {"level": "warning", "service": "tandem-test", "logger": "part", "message": "two\nlines of größe"}


def test_an_exception_is_one_field(logger: logging.Logger, handler: Collecting) -> None:
    try:
        raise KeyError("oops")
    except KeyError:
        logger.error("failed", exc_info=sys.exc_info())
    assert handler.last["message"] == "failed"
    assert handler.last["exception"].startswith("Traceback")
    assert handler.last["exception"].endswith("KeyError: 'oops'")


def test_a_request_s_records_have_its_ids(logger: logging.Logger, handler: Collecting) -> None:
    request_log(logger, "r-1", TRACE_ID, "2").info("started")
    assert (handler.last["request_id"], handler.last["attempt"], handler.last["trace_id"]) == ("r-1", "2", TRACE_ID)
    request_log(logger, "r-2").info("started")
    assert handler.last["request_id"] == "r-2"
    assert handler.last.keys().isdisjoint({"attempt", "trace_id"})


def test_only_what_the_cluster_did_wrong_is_logged_as_a_warning() -> None:
    assert failure_level(WorkerLost("gone")) == logging.WARNING
    assert failure_level(NumericalFault("NaN")) == logging.WARNING
    assert failure_level(InvalidRequest("what?")) == logging.DEBUG
    assert failure_level(Overloaded("later")) == logging.DEBUG


PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (f"00-{TRACE_ID}-{PARENT}-01", TRACE_ID),
        (f"cc-{TRACE_ID}-{PARENT}-01-what-a-later-version-adds", TRACE_ID),
        ("", ""),
        ("nonsense", ""),
        (f"00-{TRACE_ID.upper()}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE_ID}-{'0' * 16}-01", ""),
        (f"ff-{TRACE_ID}-{PARENT}-01", ""),
        (f"00-{TRACE_ID}-{PARENT}-01-more", ""),
        (f"00-{TRACE_ID}-{PARENT}", ""),
    ],
)
def test_the_trace_id_is_taken_from_a_sound_traceparent_only(traceparent: str, trace_id: str) -> None:
    assert trace_id_of(traceparent) == trace_id


@pytest.mark.parametrize("flags", ["00", "01", "03"])
def test_what_is_read_is_passed_on_but_for_flags_that_nobody_knows(flags: str) -> None:
    context = TraceContext.parse(f"00-{TRACE_ID}-{PARENT}-{flags}", "vendor=1")
    assert context is not None
    assert context.sampled == (flags != "00")
    assert context.traceparent == f"00-{TRACE_ID}-{PARENT}-{'00' if flags == '00' else '01'}"
    assert context.state == "vendor=1"
    under = context.under(7)
    assert (under.traceparent[:36], under.span_id, under.state) == (context.traceparent[:36], 7, "vendor=1")


def test_a_tracestate_that_is_too_long_is_left_out_whole() -> None:
    context = TraceContext.parse(f"00-{TRACE_ID}-{PARENT}-01", "v=" + "x" * 600)
    assert context is not None
    assert context.state == ""


def test_drawn_ids_are_none_of_the_forbidden_ones() -> None:
    traces, spans = {new_trace_id() for _ in range(1000)}, {new_span_id() for _ in range(1000)}
    assert 0 not in traces | spans
    assert (len(traces), len(spans)) == (1000, 1000)
    assert max(traces).bit_length() <= 128
    assert max(spans).bit_length() <= 64


async def test_the_current_trace_is_the_task_s_own() -> None:
    async def serve(trace_id: str) -> str:
        set_current_trace_id(trace_id)
        await asyncio.sleep(0)
        return await asyncio.create_task(inner())

    async def inner() -> str:
        return current_trace_id()

    set_current_trace_id("")  # whatever ran in this thread before
    assert await asyncio.gather(serve("a"), serve("b"), inner()) == ["a", "b", ""]
