"""What the access log says of a call, and what it counts."""

from __future__ import annotations

import json
import logging

import pytest

from services.router.dispatch.record import FINISHED, Ask, RequestEvent, RequestRecord, RequestState
from services.router.dispatch.request import FinishReason
from services.router.edge.access import NOTE, STATUS, Access, access_fields
from services.router.edge.http.app import AccessMiddleware
from services.router.edge.request_ledger import CallEntry, CallNote, Uncounted
from services.router.placement.decision import Choice
from shared.errors import Unauthenticated
from shared.telemetry.logs import JsonFormatter

TRACE = "0af7651916cd43dd8448eb211c80319c"


def end(num_output: int, ttft_ms: float, tokens_s: float, prompt: int = 7) -> RequestRecord:
    record = RequestRecord(Ask("r", arrived_at=1.0, num_prompt_tokens=3, prompt=prompt), choices=[Choice("d1", "p0")])
    first = 1.0 + ttft_ms / 1e3
    record.add(RequestEvent.FIRST_TOKEN, RequestState.SHIPPING, at=first)
    record.add(RequestEvent.FINISH, RequestState.FINISHED, at=first + tokens_s / 2)
    record.num_cached_tokens = 2
    record.close(FINISHED, FinishReason.STOP, num_output)
    record.delivered_at = first + tokens_s
    return record


def note() -> CallNote:
    return CallNote("r-1", "acme", "demo", TRACE, [])


def fields_of(call: CallNote, duration_s: float) -> dict[str, object]:
    named = {"tenant": call.tenant, "model": call.model, "request_id": call.request_id, "trace_id": call.trace_id}
    return access_fields(named, call.records, duration_s)


def test_a_line_has_what_an_operator_asks_for() -> None:
    call = note()
    call.records.append(end(11, 80.0, 0.2))
    assert fields_of(call, 0.3) == {
        "tenant": "acme",
        "model": "demo",
        "request_id": "r-1",
        "trace_id": TRACE,
        "tokens_in": 3,
        "tokens_out": 11,
        "cached": 2,
        "ttft_ms": 80.0,
        "tpot_ms": 20.0,
        "prefill": "p0",
        "decode": "d1",
        "e2e_ms": 300.0,
        "finish": "stop",
    }


def test_answers_of_one_call_are_added_up_and_their_common_prompt_once() -> None:
    call = note()
    call.records += [end(3, 80.0, 0.2), end(5, 60.0, 0.4)]
    fields = fields_of(call, 1.0)
    assert (fields["tokens_in"], fields["tokens_out"], fields["ttft_ms"], fields["tpot_ms"]) == (3, 8, 60.0, 100.0)
    call.records.append(end(1, 90.0, 0.0, prompt=8))
    assert fields_of(call, 1.0)["tokens_in"] == 6


def test_a_refused_call_has_its_reason_and_no_figures() -> None:
    entry = CallEntry(Uncounted(), 0.0)
    with pytest.raises(Unauthenticated), entry:
        raise Unauthenticated("no key")
    fields = fields_of(entry.note, 0.001)
    assert fields == {"e2e_ms": 1.0, "finish": "invalid_api_key"}


def test_what_a_client_names_cannot_make_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    access = Access("all", ("/metrics",))
    with caplog.at_level(logging.INFO):
        access.http_ended("GET", "/a\nINFO forged", 404, 0.001, None)
    assert "\n" not in caplog.messages[0]
    assert access.http.read() == {("GET", "other", "404"): 1}


def test_a_json_line_has_the_fields_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    call = note()
    call.records.append(end(2, 80.0, 0.2))
    with caplog.at_level(logging.INFO):
        Access("answers").http_ended("POST", "/v1/completions", 200, 0.25, call)
    found = json.loads(JsonFormatter("tandem-router").format(caplog.records[0]))
    assert (found["path"], found["status"], found["request_id"], found["e2e_ms"]) == (
        "/v1/completions",
        "200",
        "r-1",
        250,
    )
    assert found["trace_id"] == TRACE


@pytest.mark.parametrize(("log", "num_lines"), [("off", 0), ("answers", 1), ("all", 2)])
def test_the_setting_says_which_calls_get_a_line(log, num_lines: int, caplog: pytest.LogCaptureFixture) -> None:
    access = Access(log, ("/healthz",))
    with caplog.at_level(logging.INFO):
        access.http_ended("GET", "/healthz", 200, 0.001, None)
        access.http_ended("POST", "/v1/completions", 200, 0.001, note())
    assert len(caplog.messages) == num_lines


async def test_a_call_is_counted_by_its_status_whatever_became_of_it() -> None:
    access = Access("off", ("/v1/completions",))

    async def app(scope, receive, send) -> None:
        scope[NOTE] = note()
        match scope["path"]:
            case "/v1/completions":
                scope[STATUS] = 200
            case "/bug":
                raise ValueError("a bug")

    serve = AccessMiddleware(app, access)
    for path in ("/v1/completions", "/gone"):
        await serve({"type": "http", "method": "POST", "path": path}, None, None)
    with pytest.raises(ValueError, match="a bug"):
        await serve({"type": "http", "method": "BREW", "path": "/bug"}, None, None)
    access.http_refused(431)
    assert access.http.read() == {
        ("POST", "/v1/completions", "200"): 1,
        ("POST", "other", "499"): 1,
        ("other", "other", "500"): 1,
        ("none", "none", "431"): 1,
    }
