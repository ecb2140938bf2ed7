"""Runs batches: posts their lines to the router's own application while the fleet is idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from services.router.edge.http.batches.batch import Batch, BatchState
from services.router.edge.http.batches.files import FileStore, new_file_id
from services.router.edge.http.batches.inside import Answer, post
from services.router.edge.scheduling import BATCH_PRIORITY
from services.router.edge.settings import BatchSettings
from services.router.edge.tenants.auth import Caller
from shared.errors import NotFound, Overloaded, TandemError, brief
from shared.tasks import end_task, unbroken

logger = logging.getLogger(__name__)
LOOK_S = 0.05
"""Time between two checks for idle workers. Seconds."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 15.0
_BETWEEN_SWEEPS_S = 1.0
"""Time between two looks for expired files while a line waits. Seconds."""
AGAIN = (429, 499, 503)
"""Statuses after which a line is tried again: the cluster had no room, or lost the request."""


@dataclass(frozen=True, slots=True)
class Idleness:
    """Decides when a line of a batch may start."""

    room: Callable[[str], int]
    """Requests that the workers of the model of that name could start now without delaying any other."""
    look_s: float = LOOK_S


class BatchRunner:
    """All batches of a router. A batch that has not ended when the router does is resumed at the router's next start;
    each line of its input is answered once."""

    def __init__(
        self, files: FileStore, settings: BatchSettings, idleness: Idleness, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` gives seconds since 1970."""
        self._files = files
        self._settings = settings
        self._idleness = idleness
        self._clock = clock
        self._app: ASGIApp | None = None
        self._batches: dict[str, Batch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_running = 0
        self._sweep_at = 0.0
        self._disk = asyncio.Lock()
        files.in_use = self._reads

    def start(self, app: ASGIApp) -> None:
        """Resumes batches that had not ended. `app` serves the lines. Raises ConfigError."""
        self._app = app
        self._files.open()
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in sorted(self._folder.iterdir()):
            if (folder / "state.json").is_file():
                batch = Batch.read(folder)
                self._batches[batch.state.id] = batch
        for batch in self._batches.values():
            if not batch.state.is_ended:
                self._begin(batch)

    async def close(self) -> None:
        """Ends the tasks of all batches and unlocks the folder; twice is fine."""
        for task in list(self._tasks.values()):
            await end_task(task)
        for batch in self._batches.values():
            batch.close()
        self._files.close()

    async def create(self, state: BatchState) -> Batch:
        """Begins a batch; a cancelled call begins it too, or raises before. Raises NotFound (`input_file_id`), and
        Overloaded where `max_batches` run."""
        await self._sweep()
        self._files.get(state.tenant, state.input_file_id, "input_file_id")
        limit = self._settings.max_batches
        if sum(not batch.state.is_ended for batch in self._batches.values()) >= limit:
            raise Overloaded(f"{limit} batches run already", field="batches", limit=limit)
        batch = Batch(self._folder / state.id, state)
        self._batches[state.id] = batch  # from now on the input may not be deleted
        await unbroken(self._create(batch))
        return batch

    async def _create(self, batch: Batch) -> None:
        try:
            async with self._disk:
                await asyncio.to_thread(batch.write, batch.state)
        except BaseException:
            del self._batches[batch.state.id]
            raise
        self._begin(batch)

    def get(self, tenant: str, batch_id: str) -> Batch:
        """A tenant's batch. Raises NotFound (`batch_id`)."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.state.tenant != tenant:
            raise NotFound(f"there is no batch {brief(batch_id, 100)!r}", field="batch_id")
        return batch

    def of(self, tenant: str) -> list[Batch]:
        """A tenant's batches, newest first."""
        found = [batch for batch in self._batches.values() if batch.state.tenant == tenant]
        return sorted(found, key=lambda batch: (batch.state.created_at, batch.state.id), reverse=True)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancels a batch: its lines without an answer get an error. One that is ending or has ended stays as it is.
        Raises NotFound (`batch_id`)."""
        batch = self.get(tenant, batch_id)
        await unbroken(self._cancel(batch))
        return batch

    async def _cancel(self, batch: Batch) -> None:
        async with self._disk:
            if batch.state.status not in ("validating", "in_progress"):
                return  # it is being cancelled already, or all its lines are answered
            await asyncio.to_thread(batch.write, batch.state.at("cancelling", self._now()))
        await end_task(self._tasks.get(batch.state.id))
        if not batch.state.is_ended:
            self._begin(batch)

    @property
    def _folder(self) -> Path:
        return self._files.folder / "batches"

    def _now(self) -> int:
        return int(self._clock())

    def _reads(self, file_id: str) -> bool:
        return any(
            batch.state.input_file_id == file_id and not batch.state.is_ended for batch in self._batches.values()
        )

    async def _sweep(self) -> None:
        """Removes expired files and batches."""
        await self._files.sweep()
        oldest = self._clock() - self._settings.ttl_s
        for batch in [b for b in self._batches.values() if b.state.is_ended and b.state.created_at < oldest]:
            del self._batches[batch.state.id]
            await asyncio.to_thread(batch.remove)

    # --- one batch

    def _begin(self, batch: Batch) -> None:
        name = batch.state.id
        task = asyncio.create_task(self._run(batch), name=name)
        self._tasks[name] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._tasks.get(name) is done:
                del self._tasks[name]

        task.add_done_callback(ended)

    async def _run(self, batch: Batch) -> None:
        try:
            await self._to_the_end(batch)
        except Exception as error:
            logger.exception("batch %s failed", batch.state.id)
            failed = {
                "code": "server_error",
                "message": f"{type(error).__name__}: {error}",
                "param": None,
                "line": None,
            }
            await self._move(batch, "failed", errors=(failed,))
        finally:
            batch.close()

    async def _to_the_end(self, batch: Batch) -> None:
        state = batch.state
        data, settings = self._files.path(state.input_file_id), self._settings
        # A file in use may have expired: it is removed only after the batch has ended.
        if not await asyncio.to_thread(data.is_file):
            gone = {"code": "missing_file", "message": "the input file is gone", "param": "input_file_id", "line": None}
            await self._move(batch, "failed", errors=(gone,))
            return
        errors = await unbroken(asyncio.to_thread(batch.open, data, settings.max_line_bytes, settings.max_lines))
        if errors:
            await self._move(batch, "failed", errors=tuple(errors))
            return
        if state.status == "validating":
            await self._move(batch, "in_progress", total=batch.num_lines)
        elif state.status == "cancelling":
            await self._move(batch, "cancelling", total=batch.num_lines)
        if batch.state.status == "in_progress":
            await self._answer_all(batch, data)
        if batch.state.status == "cancelling":
            await self._give_up(batch, data, "batch_cancelled", "the batch was cancelled before this line was answered")
            await self._finish(batch, "cancelled")
        else:
            answers = batch.answers
            assert answers is not None
            is_late = len(answers) < batch.num_lines
            if is_late:
                await self._give_up(
                    batch, data, "batch_expired", "the batch's time ended before this line was answered"
                )
            await self._finish(batch, "expired" if is_late else "completed")

    async def _answer_all(self, batch: Batch, data: Path) -> None:
        """Answers the lines without an answer, until the batch expires. Raises the first error that is the router's own
        and no line's answer."""
        assert batch.answers is not None
        running: set[asyncio.Task[None]] = set()
        errors: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            self._num_running -= 1
            if not task.cancelled() and (error := task.exception()) is not None:
                errors.append(error)

        left = max(0.0, batch.state.expires_at - self._clock())
        try:
            async with asyncio.timeout(left) as limit:
                for number in range(batch.num_lines):
                    if number in batch.answers:
                        continue
                    line = await asyncio.to_thread(batch.line, data, number)
                    await self._until_idle(batch.state.tenant, str(line["body"].get("model") or ""), errors)
                    if errors:
                        break
                    self._num_running += 1
                    task = asyncio.create_task(self._answer(batch, number, line))
                    running.add(task)
                    task.add_done_callback(ended)
                while running and not errors:
                    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            if not limit.expired():  # the file system's
                raise
        finally:
            await unbroken(_end_all(running))
        if errors:
            raise errors[0]
        if not limit.expired() and len(batch.answers) < batch.num_lines:
            raise RuntimeError("a line ended without an answer")

    async def _until_idle(self, tenant: str, model: str, errors: Sequence[BaseException]) -> None:
        """Returns when one more line may start, or there are errors. The caller must count the line in `_num_running`
        before its next await, or another batch takes the same room."""

        def may_start() -> bool:
            has_room = self._num_running < self._settings.max_parallel and self._idleness.room(model) > 0
            return has_room and not self._is_full(tenant)

        while not errors and not may_start():  # no event says that workers are idle
            await asyncio.sleep(self._idleness.look_s)
            if time.monotonic() >= self._sweep_at:
                self._sweep_at = time.monotonic() + _BETWEEN_SWEEPS_S
                await self._files.sweep()

    def _is_full(self, tenant: str) -> bool:
        """Whether the bounds on files leave no room for the tenant's answers."""
        with contextlib.suppress(TandemError):
            self._files.check_room(tenant)
            return False
        return True

    async def _answer(self, batch: Batch, number: int, line: dict[str, Any]) -> None:
        answer = await self._tried(batch.state, line["body"])
        content = answer.json
        response = {
            "status_code": answer.status,
            "request_id": answer.headers.get("x-request-id", ""),
            "body": content if content is not None else answer.body.decode(errors="replace"),
        }
        what = {"response": response, "error": None}
        await self._add(batch, number, line["custom_id"], what, ok=answer.status == 200)

    async def _tried(self, state: BatchState, body: dict[str, Any]) -> Answer:
        """The first answer to a line whose status is not in `AGAIN`."""
        assert self._app is not None
        caller, wait_s = Caller(state.tenant, state.account), FIRST_RETRY_S
        headers = {"x-tenant": state.tenant, "x-priority": str(BATCH_PRIORITY)}
        # No longer than it was written: the bound of a body holds for it.
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
        while True:
            answer = await post(self._app, state.endpoint, raw, caller, headers)
            if answer.status not in AGAIN:
                return answer
            retry_after = answer.headers.get("retry-after", "")
            wait_s = min(LONGEST_RETRY_S, 2 * wait_s)
            await asyncio.sleep(
                max(float(retry_after) if retry_after.isdecimal() else 0.0, wait_s) * random.uniform(0.5, 1.0)
            )

    async def _give_up(self, batch: Batch, data: Path, code: str, message: str) -> None:
        """Gives the lines without an answer this error."""
        assert batch.answers is not None
        for number in range(batch.num_lines):
            if number not in batch.answers:
                line = await asyncio.to_thread(batch.line, data, number)
                error = {"response": None, "error": {"code": code, "message": message}}
                await self._add(batch, number, line["custom_id"], error, ok=False)

    async def _add(self, batch: Batch, number: int, custom_id: str, what: Mapping[str, object], *, ok: bool) -> None:
        answers = batch.answers
        assert answers is not None
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, **what}

        async def write() -> None:
            async with self._disk:
                await asyncio.to_thread(answers.add, number, line, ok=ok)

        await unbroken(write())

    async def _finish(self, batch: Batch, status: str) -> None:
        """Makes the answers two files. Their ids are on disk first: a router that was killed meanwhile makes the same
        files when it starts again."""
        if not batch.state.ends_as:
            stage = "cancelling" if status == "cancelled" else "finalizing"
            ids = {"output_file_id": new_file_id(), "error_file_id": new_file_id()}
            await self._move(batch, stage, ends_as=status, **ids)
        state, names = batch.state, {}
        for ok, name in ((True, "output_file_id"), (False, "error_file_id")):
            part = await unbroken(asyncio.to_thread(batch.collect, ok=ok))
            names[name] = ""
            if part is not None:
                names[name] = str(getattr(state, name))
                filename = f"{state.id}_{'output' if ok else 'error'}.jsonl"
                await self._files.keep(state.tenant, part, filename, "batch_output", file_id=names[name])
        await self._move(batch, state.ends_as, **names)
        await unbroken(asyncio.to_thread(batch.drop_answers))

    async def _move(self, batch: Batch, status: str, **changes: Any) -> None:
        async with self._disk:
            await unbroken(asyncio.to_thread(batch.write, batch.state.at(status, self._now(), **changes)))


async def _end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels all tasks and returns when they have ended; an error stays in its task."""
    await asyncio.gather(*(end_task(task) for task in tasks), return_exceptions=True)
