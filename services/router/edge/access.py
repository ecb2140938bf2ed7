"""Every call that comes in: counted by status, and where it is wanted one line in the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from services.router.dispatch.record import RequestRecord
from services.router.edge.request_ledger import CallNote
from services.router.views.metric_definitions import GRPC_CALLS, HTTP_REQUESTS
from services.router.views.timings import tpot_s, ttft_s
from shared.errors import brief
from shared.telemetry.instruments import Counter
from shared.telemetry.metrics import Observed

logger = logging.getLogger(__name__)
AccessLog = Literal["off", "answers", "all"]
"""`answers`: calls of the endpoints that answer prompts; `all`: every HTTP request."""
NOTE = "tandem.access"
"""Key of a call's `CallNote` in the ASGI scope."""
STATUS = "tandem.status"
"""Key of the answer's status there."""
CLIENT_LEFT = 499
"""Status of a request whose client left before it got a head: nginx's, and that of our `Cancelled`."""
_PLAIN = re.compile(r"[!-~]+")
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


def access_fields(
    named: Mapping[str, object], records: Sequence[RequestRecord], duration_s: float
) -> dict[str, object]:
    """What a line says beside method, path and status; what is not known is left out. `named`: what is known of the
    call itself; `records`: of its requests."""
    found = dict(named)
    answers = [record for record in records if record.ask.request_id]
    if answers:
        found |= _answered(answers)
    outcomes = {record.reason.value if record.reason is not None else record.outcome for record in records}
    return {
        **{name: value for name, value in found.items() if value != ""},
        "e2e_ms": round(duration_s * 1e3, 1),
        **({"finish": ",".join(sorted(outcomes))} if outcomes else {}),
    }


def _answered(records: Sequence[RequestRecord]) -> dict[str, object]:
    """Sums over a call's answers; TTFT is that of the first token of all, TPOT the mean."""
    begun = [ttft for record in records if (ttft := ttft_s(record)) is not None]
    paces = [tpot for record in records if (tpot := tpot_s(record)) is not None]
    prompts = {record.ask.prompt: record.ask.num_prompt_tokens for record in records}
    return {
        "tokens_in": sum(prompts.values()),
        "tokens_out": sum(record.num_given_tokens for record in records),
        "cached": sum(record.num_cached_tokens for record in records),
        "ttft_ms": round(1e3 * min(begun), 1) if begun else "",
        "tpot_ms": round(1e3 * sum(paces) / len(paces), 2) if paces else "",
        "prefill": records[0].prefill_worker,
        "decode": records[0].decode_worker,
    }


class Access:
    """Counts and logs; one a process."""

    def __init__(self, log: AccessLog = "off", paths: Collection[str] = ()) -> None:
        """`paths`: those that are counted by name."""
        self.http = Counter()
        """Number of HTTP calls by method, path and status."""
        self.grpc = Counter()
        """Number of gRPC calls by method and code."""
        self._log = log
        self._paths = frozenset(paths)

    @property
    def logs_answers(self) -> bool:
        """Whether a call that answers prompts gets a line."""
        return self._log != "off"

    def http_ended(self, method: str, path: str, status: int, duration_s: float, note: CallNote | None) -> None:
        """A request over HTTP is over; `note`: it was one for answers."""
        known = path if path in self._paths else "other"
        self.http.add(1, method if method in _METHODS else "other", known, str(status))
        if self._log == "all" or (note is not None and self._log == "answers"):
            _write(method, path, str(status), duration_s, note or CallNote())

    def http_refused(self, status: int) -> None:
        """A connection was answered with this status before there was a request that HTTP could understand."""
        self.http.add(1, "none", "none", str(status))

    def grpc_ended(self, method: str, code: str, duration_s: float, note: CallNote) -> None:
        """A call of Generate or GenerateBatch is over."""
        self.grpc.add(1, method, code)
        if self.logs_answers:
            _write("gRPC", method, code, duration_s, note)


def _write(method: str, path: str, status: str, duration_s: float, note: CallNote) -> None:
    named = {"tenant": note.tenant, "model": note.model, "request_id": note.request_id, "trace_id": note.trace_id}
    fields = access_fields(named, note.records, duration_s)
    words = [_shown(method), _shown(path), status, *(f"{name}={_shown(value)}" for name, value in fields.items())]
    logger.info(" ".join(words), extra={"fields": {"method": method, "path": path, "status": status, **fields}})


def _shown(value: object) -> str:
    """One word: what a client named must not look like a line of its own."""
    text = brief(str(value), max_len=200)
    return text if _PLAIN.fullmatch(text) else ascii(text)


CALLS: tuple[Observed[Access], ...] = (
    Observed(HTTP_REQUESTS, lambda access: access.http.read()),
    Observed(GRPC_CALLS, lambda access: access.grpc.read()),
)
"""The counts of a process, over all its models."""
