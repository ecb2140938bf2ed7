"""The HTTP server's own behaviour: statuses, bodies, events, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest

from services.router.edge.http.server.http_server import HttpServer
from shared.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    TandemError,
    TransferFailed,
    WorkerLost,
)
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import MODEL, text_steps
from tests.waiting import DEADLINE_S

COMPLETIONS = "/v1/completions"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CHAT = "/v1/chat/completions"


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


def events(text: str) -> list[str]:
    lines = text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def leave_in_the_middle(edge: Edge, body: dict[str, Any], read_until: bytes) -> None:
    """Sends a request on a connection of its own and drops it once `read_until` arrived."""
    host, _, port = edge.http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    if read_until:
        await asyncio.wait_for(reader.readuntil(read_until), DEADLINE_S)
    await asyncio.wait_for(edge.core.submitted.wait(), DEADLINE_S)
    writer.close()
    await writer.wait_closed()


async def test_probes_metrics_and_status(edge: Edge) -> None:
    assert (await edge.client.get("/healthz")).status_code == 200
    page = (await edge.client.get("/readyz")).json()
    assert page == {
        "ready": True,
        "reason": "",
        "degraded": [],
        "load": {"waiting": 0, "running": 0, "queue_limit": 0},
    }
    edge.core.reason = "no decode worker is connected"
    ready = await edge.client.get("/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (503, "no decode worker is connected")
    metrics = await edge.client.get("/metrics")
    assert metrics.text == "tandem_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    status = (await edge.client.get("/status")).json()
    assert (status["router_name"], status["num_finished"], status["workers"]) == ("router-0", "3", [])


async def test_unknown_paths_and_methods_answer_in_openais_shape(edge: Edge) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", COMPLETIONS, 405), ("POST", "/healthz", 405)):
        answer = await edge.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert path in answer.json()["error"]["message"]
        assert ("allow" in answer.headers) == (status == 405)


async def test_unknown_paths_and_methods_of_messages_answer_in_anthropics_shape(edge: Edge) -> None:
    cases = (("POST", "/v1/messages/batches", "not_found_error"), ("GET", "/v1/messages", "invalid_request_error"))
    for method, path, kind in cases:
        answer = (await edge.client.request(method, path)).json()
        assert (answer["type"], answer["error"]["type"]) == ("error", kind)
        assert path in answer["error"]["message"]


async def test_request_ids_go_in_and_out(edge: Edge) -> None:
    edge.says("x")
    drawn = await edge.client.post(COMPLETIONS, json=completion())
    assert drawn.headers["x-request-id"] == edge.core.requests[0].request_id
    headers = {"x-request-id": "from-header", "traceparent": TRACEPARENT}
    given = await edge.client.post(COMPLETIONS, json=completion(), headers=headers)
    assert (given.headers["x-request-id"], given.json()["id"]) == ("from-header", "cmpl-from-header")
    assert edge.core.requests[1].trace.traceparent == TRACEPARENT
    body = await edge.client.post(COMPLETIONS, json=completion(request_id="from-body"), headers=headers)
    assert body.headers["x-request-id"] == "from-body"
    refused = await edge.client.post(COMPLETIONS, json=completion(n="x"), headers=headers)
    assert refused.headers["x-request-id"] == "from-header"
    for bad in ({"x-request-id": "x" * 129}, {"x-request-id": "a b"}):
        answer = await edge.client.post(COMPLETIONS, json=completion(), headers=bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
        assert len(answer.headers["x-request-id"]) == 36


ERRORS: list[tuple[TandemError, int, str, str]] = [
    (InvalidRequest("x runs", field="request_id"), 400, "invalid_request_error", "invalid_value"),
    (Overloaded("full", retry_after_s=0.2), 429, "rate_limit_error", "overloaded"),
    (QuotaExceeded("used up"), 429, "rate_limit_error", "quota_exceeded"),
    (WorkerLost("gone"), 503, "server_error", "worker_lost"),
    (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["submit", "first token"])
async def test_an_error_before_the_first_token_has_its_own_status(edge: Edge, stream: bool, when: str) -> None:
    for error, status, kind, code in ERRORS:

        def script(_: object, error: TandemError = error) -> list[Exception]:
            if when == "submit":
                raise error
            return [error]

        edge.core.script = script
        answer = await edge.client.post(COMPLETIONS, json=completion(stream=stream))
        assert answer.status_code == status
        assert answer.json() == {"error": {"message": error.message, "type": kind, "param": error.field, "code": code}}
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers.get("retry-after") == ("1" if isinstance(error, Overloaded) else None)
    assert all(running.closed.is_set() for running in edge.core.running)


async def test_a_bug_of_ours_is_a_500_without_its_insides(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    edge.core.script = lambda request: [ZeroDivisionError("secret")]
    with caplog.at_level(logging.ERROR, "services.router.edge"):
        answer = await edge.client.post(COMPLETIONS, json=completion())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret" in caplog.text  # the log has it


async def test_an_error_in_mid_stream_is_the_last_event_and_there_is_no_done(edge: Edge) -> None:
    steps = text_steps(edge.tokenizer, "ab cd ef")
    edge.core.script = lambda request: [*steps[:2], TransferFailed("lost a block")]
    answer = await edge.client.post(COMPLETIONS, json=completion(stream=True))
    assert answer.status_code == 200
    found = events(answer.text)
    assert json.loads(found[-1])["error"]["code"] == "transfer_failed"
    assert "[DONE]" not in answer.text
    assert edge.core.running[0].closed.is_set()


async def test_one_choice_failing_ends_the_others(edge: Edge) -> None:
    def script(request: Any) -> list[Any]:
        if request.request_id.endswith("-1"):
            return [*text_steps(edge.tokenizer, "ab cd")[:1], WorkerLost("gone")]
        return [asyncio.Event()]

    edge.core.script = script
    answer = await edge.client.post(COMPLETIONS, json=completion(n=3))
    assert answer.status_code == 503
    assert [running.closed.is_set() for running in edge.core.running] == [True] * 3


async def test_choices_already_submitted_are_freed_when_a_later_one_is_refused(edge: Edge) -> None:
    def script(request: Any) -> list[Any]:
        if request.request_id.endswith("-2"):
            raise Overloaded("full")
        return [asyncio.Event()]

    edge.core.script = script
    answer = await edge.client.post(COMPLETIONS, json=completion(n=3, stream=True))
    assert answer.status_code == 429
    assert [running.closed.is_set() for running in edge.core.running] == [True] * 2


async def test_text_arrives_while_the_request_still_runs(edge: Edge) -> None:
    gate = asyncio.Event()
    steps = text_steps(edge.tokenizer, "ab cd")
    edge.core.script = lambda request: [*steps[:1], gate, *steps[1:]]
    async with edge.client.stream("POST", COMPLETIONS, json=completion(stream=True)) as answer:
        lines = answer.aiter_lines()
        first = await asyncio.wait_for(anext(lines), DEADLINE_S)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
        gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_client_that_leaves_a_stream_frees_the_request(edge: Edge) -> None:
    edge.core.script = lambda request: [*text_steps(edge.tokenizer, "ab cd")[:1], asyncio.Event()]
    await leave_in_the_middle(edge, completion(stream=True), b"data: ")
    await edge.closed()


async def test_a_client_that_leaves_before_the_first_token_frees_the_request(edge: Edge) -> None:
    edge.core.script = lambda request: [asyncio.Event()]
    await leave_in_the_middle(edge, completion(stream=True), b"")
    await edge.closed()


async def test_a_client_that_leaves_before_its_json_frees_all_choices(edge: Edge) -> None:
    edge.core.script = lambda request: [*text_steps(edge.tokenizer, "ab cd")[:1], asyncio.Event()]
    await leave_in_the_middle(edge, completion(n=3), b"")
    for index in range(3):
        await edge.closed(index)


async def test_a_packed_body_is_415_and_says_its_encoding(edge: Edge) -> None:
    edge.says("x")
    content = json.dumps(completion()).encode()
    for encoding, status in (("gzip", 415), ("identity", 200), ("", 200)):
        answer = await edge.client.post(COMPLETIONS, content=content, headers={"content-encoding": encoding})
        assert answer.status_code == status
        if status != 200:
            assert "Content-Encoding 'gzip' is not read here" in answer.json()["error"]["message"]


async def test_a_body_beyond_the_limit_is_413_announced_or_not(start_edge: StartEdge) -> None:
    edge = await start_edge(max_body_bytes=1024)
    edge.says("x")

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    for content in (b" " * 2000, chunks()):
        answer = await edge.client.post(COMPLETIONS, content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["param"] == "body"
        assert "1024" in answer.json()["error"]["message"]
    assert (await edge.client.post(COMPLETIONS, json=completion())).status_code == 200


async def test_more_choices_than_allowed_are_refused_before_any_runs(start_edge: StartEdge) -> None:
    edge = await start_edge(max_choices=3)
    answer = await edge.client.post(COMPLETIONS, json=completion(prompt=["a", "b"], n=2))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert not edge.core.running


async def test_one_bad_prompt_of_a_batch_refuses_all_before_any_runs(edge: Edge) -> None:
    answer = await edge.client.post(COMPLETIONS, json=completion(prompt=["a", ""]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert not edge.core.running


async def test_keys_guard_inference_models_and_status_but_not_the_probes(start_edge: StartEdge) -> None:
    edge = await start_edge(api_keys=("k1", "k2"))
    edge.says("x")
    calls = [("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/models")]
    calls += [("GET", path) for path in ("/status", "/status/requests", "/status/requests/r", "/metrics")]
    for method, path in calls:
        for headers in ({}, {"authorization": "Bearer k3"}):
            answer = await edge.client.request(method, path, headers=headers, json=completion())
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    known = {"authorization": "Bearer k2"}
    assert (await edge.client.post(COMPLETIONS, json=completion(), headers=known)).status_code == 200
    assert (await edge.client.get("/status", headers=known)).status_code == 200
    assert (await edge.client.get("/metrics", headers=known)).status_code == 200
    for path in ("/healthz", "/readyz", "/", "/page/main.js"):
        assert (await edge.client.get(path)).status_code == 200


async def test_a_taken_port_is_a_config_error_that_names_it(edge: Edge) -> None:
    with pytest.raises(ConfigError) as caught:
        await HttpServer(edge.http.address, lambda *_: None).start()  # type: ignore[arg-type]
    assert caught.value.field == "http"
    assert edge.http.address in caught.value.message


async def refused(address: str) -> None:
    """Returns once no process listens there; every try is a turn of the server's event loop."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                # Who stood in the listener's queue when it closed is reset: the next one is refused.
                with contextlib.suppress(ConnectionResetError):
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                    await writer.wait_closed()


async def test_stopping_lets_running_requests_finish_within_the_grace(edge: Edge) -> None:
    gate = asyncio.Event()
    edge.core.script = lambda request: [gate, *text_steps(edge.tokenizer, "done")]
    call = asyncio.create_task(edge.client.post(COMPLETIONS, json=completion()))
    await asyncio.wait_for(edge.core.submitted.wait(), DEADLINE_S)
    stopping = asyncio.create_task(edge.http.stop(grace_s=DEADLINE_S))
    await refused(edge.http.address)
    gate.set()
    assert (await call).json()["choices"][0]["text"] == "done"
    await stopping


async def test_stopping_cuts_off_the_rest_with_a_typed_error(edge: Edge) -> None:
    steps = text_steps(edge.tokenizer, "ab cd")
    edge.core.script = lambda request: [*steps[: len(edge.core.running) == 0], asyncio.Event()]
    async with edge.client.stream("POST", COMPLETIONS, json=completion(stream=True)) as streaming:
        lines = streaming.aiter_lines()
        await anext(lines)
        edge.core.submitted.clear()
        waiting = asyncio.create_task(edge.client.post(COMPLETIONS, json=completion()))
        await asyncio.wait_for(edge.core.submitted.wait(), DEADLINE_S)
        await edge.http.stop(grace_s=0)
        await edge.http.stop()
        last = [line async for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_lost"
    assert (await waiting).status_code == 503
    assert [running.closed.is_set() for running in edge.core.running] == [True, True]


async def test_stopping_answers_a_request_whose_body_is_still_on_its_way(edge: Edge) -> None:
    host, _, port = edge.http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n".encode())
    await asyncio.wait_for(reader.readuntil(b"100 Continue\r\n\r\n"), DEADLINE_S)
    await edge.http.stop(grace_s=0)
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"worker_lost" in answer
    writer.close()
    await writer.wait_closed()


BODIES = {
    "/v1/completions": {"prompt": "Hi."},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "/v1/responses": {"input": "Hi."},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("header", "field", "retain_s"),
    [(None, None, 0.0), ("1h", None, 3600.0), ("1h", "24h", 86_400.0), ("24h", "in-memory", 0.0), (None, "5m", 300.0)],
)
async def test_a_prefix_is_kept_as_long_as_the_body_says_or_else_the_header(
    edge: Edge, path: str, header: str | None, field: str | None, retain_s: float
) -> None:
    edge.stops_with("Yes.")
    headers = {} if header is None else {"x-cache-retention": header}
    fields = {} if field is None else {"prompt_cache_retention": field}
    assert (await edge.client.post(path, json={**BODIES[path], **fields}, headers=headers)).status_code == 200
    assert [request.retain_s for request in edge.core.requests] == [retain_s]
