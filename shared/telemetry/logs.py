"""A process's log on stderr: lines of text, or one JSON object a line.

A JSON record has `time` (ISO 8601, UTC), `level`, `service`, `logger` and `message`; `exception`, with the traceback,
if there is one; and, if it concerns a request, `request_id`, `attempt` (on workers: which of the router's attempts) and
`trace_id` (if the request has a trace, its client's or our own). Records of the router's access log have fields of
their own.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from shared.errors import TandemError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

RequestLog = logging.LoggerAdapter[logging.Logger]
"""Logs with the fields of one request."""

_REQUEST_FIELDS = ("request_id", "attempt", "trace_id")


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, without line breaks."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """See the module's docstring."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name in _REQUEST_FIELDS if (value := getattr(record, name, None))}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps(fields, ensure_ascii=False, default=str)


def set_up_logs(service: str, log_format: LogFormat = "text", level: LogLevel = "info") -> None:
    """Makes the root logger write to stderr and removes its other handlers; with JSON it logs Python warnings too."""
    formatter: logging.Formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log_format == "json":
        formatter = JsonFormatter(service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(log_format == "json")


def request_log(logger: logging.Logger, request_id: str, trace_id: str = "", attempt: str = "") -> RequestLog:
    """A logger whose records have the request's fields. `trace_id`: 32 hex digits, empty without a trace."""
    fields = {"request_id": request_id, "attempt": attempt, "trace_id": trace_id}
    return logging.LoggerAdapter(logger, fields)


def failure_level(error: TandemError) -> int:
    """The log level for a failed request: warning if the cluster is at fault; debug if the client is, or if refusals
    under load would fill the log."""
    return logging.WARNING if error.http_status >= 500 else logging.DEBUG
