"""Batches over a real folder and an application that the test answers for: what overlaps, fails or comes late."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from services.router.edge.http.batches.batch import Batch, BatchState
from services.router.edge.http.batches.files import FileStore
from services.router.edge.http.batches.runner import BatchRunner, Idleness
from services.router.edge.settings import BatchSettings
from shared.errors import InvalidRequest, QuotaExceeded
from shared.tasks import unbroken
from tests.waiting import until

CHAT = "/v1/chat/completions"
DAY_S = 86_400
Serve = Callable[[dict[str, Any]], Awaitable[None]]


async def at_once(_: dict[str, Any]) -> None:
    """Serves a line without delay."""


async def never(_: dict[str, Any]) -> None:
    """Serves no line."""
    await asyncio.Event().wait()


class Bench:
    """A runner and its files; `serve` returns when a line may be answered, or raises."""

    def __init__(self, folder: Path, serve: Serve = at_once, room: Callable[[str], int] = lambda _: 8) -> None:
        self.now = 1_000_000.0
        self.serve = serve
        settings = BatchSettings(folder=folder, tenant_bytes=10_000)
        self.files = FileStore(settings, lambda: self.now)
        self.runner = BatchRunner(self.files, settings, Idleness(room, 0.001), lambda: self.now)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.serve(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def begin(self, num_lines: int, model: str = "m", name: str = "batch_1") -> Batch:
        """A batch of `num_lines` chat requests, whose input file expires in an hour."""
        lines = [
            {"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": {"model": model}} for i in range(num_lines)
        ]
        data, _ = await self.files.write("t", pieces("\n".join(json.dumps(line) for line in lines).encode()))
        file = await self.files.keep("t", data, "in.jsonl", "batch", 3600.0)
        now = int(self.now)
        return await self.runner.create(BatchState(name, "t", "t", CHAT, file.id, "24h", now, now + DAY_S))

    def lines(self, batch: Batch, *, ok: bool) -> list[dict[str, Any]]:
        """Of one of its two files."""
        file_id = batch.state.output_file_id if ok else batch.state.error_file_id
        return [json.loads(line) for line in self.files.path(file_id).read_text().splitlines()] if file_id else []


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


@asynccontextmanager
async def started(bench: Bench) -> AsyncIterator[Bench]:
    bench.runner.start(bench.app)
    try:
        yield bench
    finally:
        await bench.runner.close()


async def test_cancels_that_overlap_end_the_batch_once(tmp_path: Path) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def ends_late(_: dict[str, Any]) -> None:
        entered.set()
        await unbroken(release.wait())

    async with started(Bench(tmp_path, ends_late)) as bench:
        batch = await bench.begin(30)
        await until(entered.is_set)
        first, *others = [asyncio.create_task(bench.runner.cancel("t", batch.state.id)) for _ in range(3)]
        try:
            await until(lambda: all(other.done() for other in others))  # only the first ends the lines
            assert not first.done()
        finally:
            release.set()
        await first
        assert len([task for task in asyncio.all_tasks() if task.get_name() == batch.state.id]) <= 1
        await until(lambda: batch.state.is_ended)
        assert batch.state.status == "cancelled"
        assert [line["custom_id"] for line in bench.lines(batch, ok=False)] == [f"c{i}" for i in range(30)]


async def test_a_cancelled_batch_begins_anew_behind_the_thread_of_its_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release, genuine = threading.Event(), threading.Event(), Batch.open
    num_open, most_open = 0, 0

    def slow_open(batch: Batch, *arguments: Any) -> list[dict[str, object]]:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        entered.set()
        release.wait()
        errors = genuine(batch, *arguments)
        num_open -= 1
        return errors

    monkeypatch.setattr(Batch, "open", slow_open)
    async with started(Bench(tmp_path)) as bench:
        try:
            batch = await bench.begin(3)
            await until(entered.is_set)
            cancelling = asyncio.create_task(bench.runner.cancel("t", batch.state.id))
            await until(lambda: batch.state.status == "cancelling")
            await asyncio.wait({cancelling}, timeout=0.2)
            assert not cancelling.done()
        finally:
            release.set()
        await cancelling
        await until(lambda: batch.state.is_ended)
        assert (batch.state.status, most_open) == ("cancelled", 1)
        assert len(bench.lines(batch, ok=False)) == 3


async def test_a_batch_that_waits_for_its_model_keeps_no_other_waiting(tmp_path: Path) -> None:
    looks: list[str] = []

    def room(model: str) -> int:
        looks.append(model)
        return 8 if model == "idle" else 0

    async with started(Bench(tmp_path, room=room)) as bench:
        waits = await bench.begin(1, "busy")
        await until(lambda: looks)
        other = await bench.begin(2, "idle", "batch_2")
        await until(lambda: other.state.is_ended)
        assert (other.state.status, waits.state.status) == ("completed", "in_progress")


async def test_a_batch_is_resumed_though_its_input_has_expired(tmp_path: Path) -> None:
    async with started(Bench(tmp_path, never)) as first:
        batch = await first.begin(2)
        await until(lambda: batch.state.status == "in_progress")
    again = Bench(tmp_path)
    again.now += 7200
    async with started(again):
        resumed = again.runner.get("t", batch.state.id)
        await until(lambda: resumed.state.is_ended)
        assert resumed.state.status == "completed"
        assert len(again.lines(resumed, ok=True)) == 2


async def test_a_line_without_room_is_tried_again_after_longer_and_longer_waits_and_those_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [(429, "7"), (499, ""), (503, "soon"), *[(503, "")] * 4, (429, "20"), (500, "3")]
    waits: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status, after = statuses.pop(0)
        await send({"type": "http.response.start", "status": status, "headers": [(b"Retry-After", after.encode())]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def noted(wait_s: float) -> None:
        waits.append(wait_s)

    runner = Bench(tmp_path).runner
    monkeypatch.setattr(runner, "_app", app)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    monkeypatch.setattr("asyncio.sleep", noted)
    answer = await runner._tried(BatchState("batch_1", "t", "t", CHAT, "file_1", "24h", 0, DAY_S), {})
    assert (answer.status, statuses) == (500, []), "other errors are the line's answer"
    assert waits == [7.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 20.0]


async def test_a_batch_whose_input_is_gone_fails(tmp_path: Path) -> None:
    async with started(Bench(tmp_path, never)) as first:
        batch = await first.begin(2)
        await until(lambda: batch.state.status == "in_progress")
        first.files.path(batch.state.input_file_id).unlink()
    again = Bench(tmp_path)
    async with started(again):
        resumed = again.runner.get("t", batch.state.id)
        await until(lambda: resumed.state.is_ended)
        assert (resumed.state.status, resumed.state.errors[0]["code"]) == ("failed", "missing_file")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no space left"), "OSError: no space left"),
        (asyncio.CancelledError(), "RuntimeError: a line ended without an answer"),
    ],
    ids=["error", "cancellation"],
)
async def test_what_breaks_a_line_within_the_router_fails_the_batch_by_its_name(
    tmp_path: Path, error: BaseException, message: str
) -> None:
    async def breaks(body: dict[str, Any]) -> None:
        raise error

    async with started(Bench(tmp_path, breaks)) as bench:
        batch = await bench.begin(5)
        await until(lambda: batch.state.is_ended)
        assert batch.state.status == "failed"
        assert batch.state.errors[0]["message"] == message


async def test_a_timeout_of_the_disk_fails_the_batch_and_does_not_expire_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times_out(*_: object) -> dict[str, Any]:
        raise TimeoutError("the disk does not answer")

    monkeypatch.setattr(Batch, "line", times_out)
    async with started(Bench(tmp_path)) as bench:
        batch = await bench.begin(2)
        await until(lambda: batch.state.is_ended)
        assert batch.state.status == "failed"
        assert batch.state.errors[0]["message"] == "TimeoutError: the disk does not answer"


async def test_a_cancelled_batch_begins_anew_behind_all_lines_of_its_last_run(tmp_path: Path) -> None:
    num_open, release = 0, asyncio.Event()

    async def ends_late(_: dict[str, Any]) -> None:
        nonlocal num_open
        num_open += 1
        try:
            await unbroken(release.wait())
        finally:
            num_open -= 1

    async with started(Bench(tmp_path, ends_late)) as bench:
        try:
            batch = await bench.begin(3)
            await until(lambda: num_open == 3)
            cancelling = asyncio.create_task(bench.runner.cancel("t", batch.state.id))
            await asyncio.wait({cancelling}, timeout=0.5)  # longer than `end_task` waits before it cancels again
            assert (cancelling.done(), num_open) == (False, 3)
        finally:
            release.set()
        await cancelling
        assert num_open == 0
        await until(lambda: batch.state.is_ended)
        assert (batch.state.status, len(bench.lines(batch, ok=False))) == ("cancelled", 3)


async def test_the_input_of_a_batch_that_is_being_created_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release, genuine = threading.Event(), threading.Event(), Batch.write

    def slow_write(batch: Batch, state: BatchState) -> None:
        if state.status == "validating":
            entered.set()
            release.wait()
        genuine(batch, state)

    monkeypatch.setattr(Batch, "write", slow_write)
    async with started(Bench(tmp_path)) as bench:
        creating = asyncio.create_task(bench.begin(1))
        try:
            await until(entered.is_set)
            (file,) = bench.files.of("t")
            with pytest.raises(InvalidRequest):
                await bench.files.delete("t", file.id)
            creating.cancel()  # the client goes away: the batch is begun all the same
        finally:
            release.set()
        await asyncio.wait({creating})
        (batch,) = bench.runner.of("t")
        await until(lambda: batch.state.is_ended)
        assert batch.state.status == "completed"


async def test_a_batch_that_cannot_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Batch, "write", fails)
    async with started(Bench(tmp_path)) as bench:
        with pytest.raises(OSError, match="no space left"):
            await bench.begin(1)
        assert bench.runner.of("t") == []
        (file,) = bench.files.of("t")
        await bench.files.delete("t", file.id)


async def test_a_client_that_leaves_while_its_file_is_kept_leaves_a_file_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release, genuine = threading.Event(), threading.Event(), os.fsync

    def slow_fsync(descriptor: int) -> None:
        entered.set()
        release.wait()
        genuine(descriptor)

    async with started(Bench(tmp_path)) as bench:
        data, _ = await bench.files.write("t", pieces(b"x" * 6000))
        monkeypatch.setattr(os, "fsync", slow_fsync)
        keeping = asyncio.create_task(bench.files.keep("t", data, "in", "batch"))
        try:
            await until(entered.is_set)
            keeping.cancel()
        finally:
            release.set()
        await asyncio.wait({keeping})
        assert keeping.cancelled()
        (file,) = bench.files.of("t")
        assert bench.files.path(file.id).read_bytes() == b"x" * 6000
        with pytest.raises(QuotaExceeded):
            await bench.files.write("t", pieces(b"x" * 6000))


async def test_expired_files_leave_their_room_to_an_upload(tmp_path: Path) -> None:
    async with started(Bench(tmp_path)) as bench:
        data, _ = await bench.files.write("t", pieces(b"x" * 9000))
        old = await bench.files.keep("t", data, "old", "batch", 3600.0)
        with pytest.raises(QuotaExceeded):
            await bench.files.write("t", pieces(b"x" * 9000))
        bench.now += 3601
        await bench.files.write("t", pieces(b"x" * 9000))
        assert not bench.files.path(old.id).exists()


async def test_uploads_under_way_count_until_they_are_dropped_or_kept(tmp_path: Path) -> None:
    async with started(Bench(tmp_path)) as bench:
        first, _ = await bench.files.write("t", pieces(b"x" * 6000))
        with pytest.raises(QuotaExceeded):
            await bench.files.write("t", pieces(b"x" * 6000))
        other, _ = await bench.files.write("u", pieces(b"x" * 6000))
        await bench.files.drop(first)
        assert not first.exists()
        again, _ = await bench.files.write("t", pieces(b"x" * 6000))
        await bench.files.keep("t", again, "again", "batch")
        bench.files.check_room("t")  # it counts once
        with pytest.raises(QuotaExceeded):
            await bench.files.write("t", pieces(b"x" * 6000))
        await bench.files.drop(other)
