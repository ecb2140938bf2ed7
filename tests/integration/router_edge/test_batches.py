"""`/v1/files` and `/v1/batches` as the OpenAI SDK uses them, over the real server and a real folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.http.batches.batch import Answers
from shared.errors import ConfigError, Overloaded
from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.unit.router.edge.scripted_core import MODEL, Step, text_steps
from tests.waiting import until

CHAT = "/v1/chat/completions"
TENANTS = {"a": {"api_keys": ("ka",)}, "b": {"api_keys": ("kb",)}}


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"q{number}"}], "max_tokens": 8}
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body, **changes}


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def begun(client: openai.AsyncOpenAI, content: bytes, endpoint: str = CHAT) -> Any:
    """A batch over this file."""
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"a": "b"},
    )


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async def look() -> Any:
        now = await client.batches.retrieve(batch.id)
        return now if now.status in ("completed", "failed", "expired", "cancelled") else None

    return await until(look)


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


@pytest.fixture
async def edge(start_edge: StartEdge, tmp_path: Path) -> Edge:
    edge = await start_edge(batch={"folder": tmp_path / "batches"})
    edge.stops_with("Yes.")
    return edge


async def test_each_line_has_one_answer_in_order_and_failures_are_apart(edge: Edge) -> None:
    bad = line(3, body={"messages": []})
    batch = await begun(edge.openai, jsonl([line(0), line(1), line(2), bad, line(4)]))
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"a": "b"})
    done = await ended(edge.openai, batch)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    output = await answers(edge.openai, done.output_file_id)
    assert [each["custom_id"] for each in output] == ["c0", "c1", "c2", "c4"]
    for each in output:
        assert (each["response"]["status_code"], each["error"]) == (200, None)
        assert each["response"]["body"]["choices"][0]["message"]["content"] == "Yes."
    (failed,) = await answers(edge.openai, done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("c3", 400)
    assert failed["response"]["body"]["error"]["param"] == "messages"
    assert {request.priority for request in edge.core.requests} == {-100}


async def test_a_line_is_as_long_as_it_was_written(start_edge: StartEdge, tmp_path: Path) -> None:
    edge = await start_edge(batch={"folder": tmp_path / "batches"}, max_body_bytes=1024)
    edge.core.limit = 4000
    edge.stops_with("Yes.")
    bodies = ({"prompt": "é" * 500}, {"prompt": [1] * 500}, {"prompt": "a" * 1025})
    content = "\n".join(
        json.dumps(line(i, url="/v1/completions", body=body), ensure_ascii=False, separators=(",", ":"))
        for i, body in enumerate(bodies)
    )
    done = await ended(edge.openai, await begun(edge.openai, content.encode(), "/v1/completions"))
    assert [each["custom_id"] for each in await answers(edge.openai, done.output_file_id)] == ["c0", "c1"]
    (longer,) = await answers(edge.openai, done.error_file_id)
    assert (longer["custom_id"], longer["response"]["status_code"]) == ("c2", 413)


async def test_other_endpoints_and_the_last_line_without_an_end(edge: Edge) -> None:
    body = {"model": MODEL, "input": "hi"}
    only = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": body}
    done = await ended(edge.openai, await begun(edge.openai, jsonl([only]).strip(), "/v1/responses"))
    (found,) = await answers(edge.openai, done.output_file_id)
    kept = await edge.openai.responses.retrieve(found["response"]["body"]["id"])
    assert kept.output_text == "Yes."


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["no json"], "mismatched", 1),
        ([line(0), line(0)], "duplicate_custom_id", 2),
        ([line(0), line(1, method="GET")], "invalid_method", 2),
        ([line(0, url="/v1/completions")], "mismatched_endpoint", 1),
        ([line(0, body=[])], "invalid_request", 1),
        ([line(0, body={"stream": True})], "invalid_request", 1),
        ([line(0, custom_id="")], "invalid_custom_id", 1),
    ],
)
async def test_what_is_wrong_with_the_input_is_told_by_line_and_nothing_runs(
    edge: Edge, lines: list[Any], code: str, number: int
) -> None:
    content = b"{no json\n" if lines == ["no json"] else jsonl(lines)
    done = await ended(edge.openai, await begun(edge.openai, content))
    assert done.status == "failed"
    (error,) = done.errors.data
    assert (error.code, error.line) == ("invalid_json_line" if code == "mismatched" else code, number)
    assert not edge.core.requests


async def test_more_lines_than_the_limit_fail_the_batch(start_edge: StartEdge, tmp_path: Path) -> None:
    edge = await start_edge(batch={"folder": tmp_path / "batches", "max_lines": 2})
    done = await ended(edge.openai, await begun(edge.openai, jsonl([line(i) for i in range(3)])))
    assert (done.status, done.errors.data[0].code) == ("failed", "too_many_tasks")


async def test_files_are_listed_read_and_deleted_by_their_tenant_alone(start_edge: StartEdge, tmp_path: Path) -> None:
    edge = await start_edge(tenants=TENANTS, batch={"folder": tmp_path / "batches"})
    mine, other = edge.openai.with_options(api_key="ka"), edge.openai.with_options(api_key="kb")
    data = bytes(range(256)) * 9000  # more than what is written at once, and with every byte
    file = await mine.files.create(file=('a "b".bin', data), purpose="user_data")
    assert (file.bytes, file.filename, file.purpose) == (len(data), 'a "b".bin', "user_data")
    small = await mine.files.create(
        file=("s.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert small.expires_at == small.created_at + 3600
    theirs = await other.files.create(file=("t.jsonl", b"x"), purpose="batch")
    assert (await mine.files.content(file.id)).content == data
    assert {each.id async for each in mine.files.list(limit=1)} == {file.id, small.id}
    assert [each.id async for each in mine.files.list(purpose="batch")] == [small.id]
    assert [each.id async for each in other.files.list()] == [theirs.id]
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(file.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await other.batches.create(input_file_id=small.id, endpoint=CHAT, completion_window="24h")
    assert caught.value.param == "input_file_id"
    assert (await mine.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await mine.files.retrieve(file.id)
    left = {path.name for path in (tmp_path / "batches" / "files").glob("*.data")}
    assert left == {f"{small.id}.data", f"{theirs.id}.data"}


async def test_batches_are_listed_newest_first_and_by_tenant(start_edge: StartEdge, tmp_path: Path) -> None:
    edge = await start_edge(tenants=TENANTS, batch={"folder": tmp_path / "batches"})
    edge.stops_with("Yes.")
    mine, other = edge.openai.with_options(api_key="ka"), edge.openai.with_options(api_key="kb")
    made = [await begun(mine, jsonl([line(i)])) for i in range(3)]
    for batch in made:
        assert (await ended(mine, batch)).status == "completed"
    theirs = await begun(other, jsonl([line(3)]))
    assert (await ended(other, theirs)).status == "completed"
    assert {batch.id async for batch in mine.batches.list(limit=2)} == {batch.id for batch in made}
    assert [batch.id async for batch in other.batches.list()] == [theirs.id]
    for ask in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask(made[0].id)
    assert [request.tenant for request in edge.core.requests] == ["a", "a", "a", "b"]


async def test_a_cancelled_batch_answers_what_is_left_with_an_error(edge: Edge) -> None:
    first = [True]

    def script(_: Request) -> list[Step]:
        if first:
            first.clear()
            return list(text_steps(edge.tokenizer, "Yes.", FinishReason.STOP))
        return [asyncio.Event()]

    edge.core.script = script
    batch = await begun(edge.openai, jsonl([line(i) for i in range(20)]))

    async def has_one() -> bool:
        counts = (await edge.openai.batches.retrieve(batch.id)).request_counts
        return counts is not None and counts.completed == 1 and len(edge.core.running) > 1

    await until(has_one)
    file = await edge.openai.batches.retrieve(batch.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await edge.openai.files.delete(file.input_file_id)
    assert caught.value.param == "file_id"
    assert (await edge.openai.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    done = await ended(edge.openai, batch)
    assert done.status == "cancelled"
    assert done.request_counts.completed == 1
    output, errors = await answers(edge.openai, done.output_file_id), await answers(edge.openai, done.error_file_id)
    assert len(output) == 1
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert sorted(each["custom_id"] for each in [*output, *errors]) == sorted(f"c{i}" for i in range(20))
    for running in edge.core.running:
        assert running.closed.is_set()
    assert (await edge.openai.files.delete(done.input_file_id)).deleted


async def test_a_line_that_found_no_room_is_tried_again(edge: Edge) -> None:
    refusals = iter([Overloaded("full", retry_after_s=1.0)])

    def script(_: Request) -> Iterator[Step]:
        refused = next(refusals, None)
        return iter([refused]) if refused is not None else iter(text_steps(edge.tokenizer, "Yes.", FinishReason.STOP))

    edge.core.script = script
    done = await ended(edge.openai, await begun(edge.openai, jsonl([line(0)])))
    assert (done.status, done.request_counts.completed, len(edge.core.requests)) == ("completed", 1, 2)


async def test_nothing_starts_while_the_fleet_has_no_idle_room(edge: Edge) -> None:
    edge.core.room = 0
    batch = await begun(edge.openai, jsonl([line(i) for i in range(3)]))
    await until(lambda: edge.core.num_looks)
    assert (await edge.openai.batches.retrieve(batch.id)).status == "in_progress"
    await edge.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "now"}])
    looks = edge.core.num_looks
    await until(lambda: edge.core.num_looks > looks + 1)
    assert [request.priority for request in edge.core.requests] == [0]
    edge.core.room = 1
    assert (await ended(edge.openai, batch)).status == "completed"


async def test_a_router_that_comes_back_answers_what_is_left_and_each_line_once(
    start_edge: StartEdge, tmp_path: Path
) -> None:
    folder = tmp_path / "batches"
    one = await start_edge(batch={"folder": folder, "max_parallel": 2})
    answered = iter(range(5))
    one.core.script = lambda _: (
        text_steps(one.tokenizer, "One.", FinishReason.STOP) if next(answered, None) is not None else [asyncio.Event()]
    )
    batch = await begun(one.openai, jsonl([line(i) for i in range(12)]))

    async def has_five() -> bool:
        counts = (await one.openai.batches.retrieve(batch.id)).request_counts
        return counts is not None and counts.completed == 5

    await until(has_five)
    with pytest.raises(ConfigError, match="another process has it"):
        await start_edge(batch={"folder": folder})
    await one.stop()
    journal = folder / "batches" / batch.id / "answers.jsonl"
    with journal.open("ab") as torn:
        torn.write(b'{"n": 9, "ok": true, "li')  # what a death cut off
    other = await start_edge(batch={"folder": folder})
    other.stops_with("Two.")
    done = await ended(other.openai, batch)
    assert (done.status, done.request_counts.completed) == ("completed", 12)
    output = await answers(other.openai, done.output_file_id)
    assert [each["custom_id"] for each in output] == [f"c{i}" for i in range(12)]
    texts = [each["response"]["body"]["choices"][0]["message"]["content"] for each in output]
    assert (texts.count("One."), texts.count("Two.")) == (5, 7)
    assert len(other.core.requests) == 7


def test_a_torn_answer_is_dropped_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = Answers(path)
    first.add(1, {"custom_id": "b"}, ok=True)
    first.add(0, {"custom_id": "a"}, ok=False)
    first.close()
    first.add(2, {"custom_id": "late"}, ok=True)  # closed: answered later
    with path.open("ab") as torn:
        torn.write(b'{"n": 2, "o')
    again = Answers(path)
    assert (len(again), again.num_ok, 2 in again) == (2, 1, False)
    again.add(2, {"custom_id": "c"}, ok=True)
    assert [json.loads(each)["custom_id"] for each in again.lines(ok=True)] == ["b", "c"]
    again.close()


async def test_bounds_of_files_are_refused_by_name(start_edge: StartEdge, tmp_path: Path) -> None:
    limits = {"max_file_bytes": 20_000, "tenant_bytes": 30_000, "max_bytes": 50_000}
    edge = await start_edge(tenants=TENANTS, batch={"folder": tmp_path / "batches", **limits})
    mine, other = edge.openai.with_options(api_key="ka"), edge.openai.with_options(api_key="kb")
    with pytest.raises(openai.APIStatusError) as large:
        await mine.files.create(file=("x", b"x" * 20_001), purpose="batch")
    assert (large.value.status_code, large.value.param) == (413, "body")
    await mine.files.create(file=("x", b"x" * 20_000), purpose="batch")
    with pytest.raises(openai.RateLimitError) as full:
        await mine.files.create(file=("x", b"x" * 20_000), purpose="batch")
    assert (full.value.code, full.value.param) == ("quota_exceeded", "file")
    await other.files.create(file=("x", b"x" * 20_000), purpose="batch")
    with pytest.raises(openai.RateLimitError) as all_full:
        await other.files.create(file=("x", b"x" * 10_001), purpose="batch")
    assert all_full.value.code in ("overloaded", "quota_exceeded")
    assert not list((tmp_path / "batches" / "files").glob("*.part"))


HEAD = {"content-type": "multipart/form-data; boundary=B"}
FILE = b'--B\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n'
PURPOSE = b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
END = b"--B--\r\n"


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        (b"{}", {"content-type": "application/json"}, "content-type"),
        (b"", HEAD, "body"),
        (FILE + PURPOSE, HEAD, "body"),  # without an end
        (FILE + END, HEAD, "purpose"),
        (PURPOSE + END, HEAD, "file"),
        (FILE + FILE + PURPOSE + END, HEAD, "file"),
        (FILE.replace(b"abc", b"") + PURPOSE + END, HEAD, "file"),
        (FILE + PURPOSE.replace(b"batch\r", b"vision\r") + END, HEAD, "purpose"),
        (FILE.replace(b'name="file"', b'name="other"') + PURPOSE + END, HEAD, "file"),
        (b"--B\r\nx: y\r\n\r\nabc\r\n" + END, HEAD, "body"),
        (b"--B\r\n" + b"x" * 10_000 + FILE + END, HEAD, "body"),
        (PURPOSE * 20 + FILE + END, HEAD, "body"),
    ],
)
async def test_hostile_forms_are_refused_and_leave_nothing(
    edge: Edge, tmp_path: Path, body: bytes, headers: dict[str, str], param: str
) -> None:
    answer = await edge.client.post("/v1/files", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert list((tmp_path / "batches" / "files").iterdir()) == []


async def test_a_form_in_any_order_and_any_pieces_is_read(edge: Edge) -> None:
    whole = PURPOSE + FILE.replace(b"abc", b"a\r\n--Ac\r\n--") + END + b"epilogue"

    async def pieces() -> Any:
        for i in range(len(whole)):
            yield whole[i : i + 1]

    answer = await edge.client.post("/v1/files", content=pieces(), headers=HEAD)
    assert answer.status_code == 200, answer.text
    content = await edge.client.get(f"/v1/files/{answer.json()['id']}/content")
    assert content.content == b"a\r\n--Ac\r\n--"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings!"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ],
)
async def test_bad_batches_are_refused_by_name(edge: Edge, change: dict[str, Any], param: str) -> None:
    file = await edge.openai.files.create(file=("x", b"{}"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **change}
    answer = await edge.client.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_without_a_folder_they_say_so(start_edge: StartEdge) -> None:
    edge = await start_edge()
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches"), ("POST", "/v1/files")):
        answer = await edge.client.request(method, path, json={})
        assert answer.status_code == 404
        assert "edge.batch.folder is not set" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"service_tier": "flex"}, -50),
        ({"service_tier": "priority"}, 50),
        ({"service_tier": "default"}, 0),
        ({"service_tier": "flex", "priority": -7}, 7),
    ],
)
async def test_service_tiers_are_priorities(edge: Edge, fields: dict[str, Any], priority: int) -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ):
        if path == "/v1/responses" and "priority" in fields:
            continue
        assert (await edge.client.post(path, json={**body, **fields})).status_code == 200
    assert {request.priority for request in edge.core.requests} == {priority}


async def test_a_cache_key_is_a_session_unless_a_header_names_one(edge: Edge) -> None:
    asks = [(CHAT, {"messages": [{"role": "user", "content": "x"}]}), ("/v1/completions", {"prompt": "x"})]
    for path, body in [*asks, ("/v1/responses", {"input": "x"})]:
        await edge.client.post(path, json={**body, "prompt_cache_key": "k ä/\n"})
    await edge.client.post(CHAT, json={**asks[0][1], "prompt_cache_key": "other"})
    *same, other = [request.session for request in edge.core.requests]
    assert len(set(same)) == 1
    assert other not in {"", same[0]}
    await edge.client.post(CHAT, json={**asks[0][1], "prompt_cache_key": "k"}, headers={"x-session-id": "mine"})
    assert edge.core.requests[-1].session == "mine"
