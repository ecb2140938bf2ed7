"""The log as JSON: one object a record, with the request's ids where it concerns one."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

from shared.errors import InvalidRequest, NumericalFault, Overloaded, WorkerLost
from shared.telemetry.logs import JsonFormatter, failure_level, request_log

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
