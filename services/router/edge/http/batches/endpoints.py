"""Handlers of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from services.router.edge.http.batches.batch import BatchState
from services.router.edge.http.batches.files import FileStore
from services.router.edge.http.batches.multipart import Field as FormField
from services.router.edge.http.batches.multipart import FileBegins, FileData, Part, parts
from services.router.edge.http.batches.runner import BatchRunner
from services.router.edge.http.bodies import STRICT, BodyTooLargeError, check_json_size, parse_body, pieces, read_body
from services.router.edge.http.listing import in_order, page, tenant_of
from services.router.edge.http.openai.schemas import MAX_METADATA
from services.router.edge.http.openai.unsupported import refuse_extra
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys, credentials
from shared.errors import InvalidRequest, NotFound, brief

WINDOW_S = 86_400
"""The only completion window, 24h. Seconds."""
MAX_FILES_PAGE = 10_000
MAX_FILENAME_LEN = 256
PURPOSES = ("batch", "user_data")
LEAST_TTL_S, MOST_TTL_S = 3600, 2_592_000
BATCH_FIELDS: Mapping[str, tuple[object, ...]] = {"output_expires_after": ()}
"""Fields of OpenAI's API that are refused unless they have one of these values."""


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = STRICT

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None


class Batches:
    """Handlers. Where no folder is set they answer 404 with that reason."""

    def __init__(
        self, keys: ApiKeys, settings: EdgeSettings, files: FileStore | None, runner: BatchRunner | None
    ) -> None:
        self._keys = keys
        self._settings = settings
        self._files = files
        self._runner = runner

    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.files, methods=["GET"]),
            Route(file, self.file, methods=["GET"]),
            Route(file, self.delete, methods=["DELETE"]),
            Route(f"{file}/content", self.content, methods=["GET"]),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.batches, methods=["GET"]),
            Route(batch, self.batch, methods=["GET"]),
            Route(f"{batch}/cancel", self.cancel, methods=["POST"]),
        ]

    # Files

    async def upload(self, request: Request) -> Response:
        """`POST /v1/files`: a form with `purpose`, `file` and optionally `expires_after`."""
        tenant, files = tenant_of(request, self._keys), self._file_store()
        length = request.headers.get("content-length", "")
        limit = self._settings.batch.max_file_bytes
        if length.isdecimal() and int(length) > limit + (1 << 16):
            raise BodyTooLargeError(limit)
        form = _Form(parts(request.headers.get("content-type", ""), pieces(request.receive)))
        data, num_bytes = await form.file_data(files, tenant)
        try:
            purpose, ttl_s = form.purpose(), form.ttl_s()
            if not num_bytes:
                raise InvalidRequest("file is empty", field="file")
            stored = await files.keep(tenant, data, form.filename, purpose, ttl_s)
        except BaseException:
            await files.drop(data)
            raise
        return JSONResponse(stored.body)

    async def files(self, request: Request) -> Response:
        """`GET /v1/files`, as pages."""
        found = self._file_store().of(tenant_of(request, self._keys))
        purpose = request.query_params.get("purpose")
        bodies = [file.body for file in found if purpose in (None, file.purpose)]
        return JSONResponse(page(request, in_order(request, bodies), most=MAX_FILES_PAGE, default=MAX_FILES_PAGE))

    async def file(self, request: Request) -> Response:
        """`GET /v1/files/{id}`."""
        tenant = tenant_of(request, self._keys)
        return JSONResponse(self._file_store().get(tenant, request.path_params["file_id"]).body)

    async def content(self, request: Request) -> Response:
        """`GET /v1/files/{id}/content`."""
        tenant, files = tenant_of(request, self._keys), self._file_store()
        found = files.get(tenant, request.path_params["file_id"])
        return FileResponse(files.path(found.id), media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/files/{id}`."""
        file_id = request.path_params["file_id"]
        tenant = tenant_of(request, self._keys)
        await self._file_store().delete(tenant, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    # Batches

    async def create(self, request: Request) -> Response:
        """`POST /v1/batches`."""
        tenant, runner = tenant_of(request, self._keys), self._batch_runner()
        body = await read_body(request.receive, request.headers, self._settings.max_body_bytes)
        await check_json_size(body, self._settings.limits, 0)
        asked = parse_body(BatchRequest, body)
        refuse_extra(asked, BATCH_FIELDS)
        now = int(time.time())
        account = self._keys.account(credentials(request.headers), tenant)
        state = BatchState(
            id=f"batch_{uuid.uuid4().hex}",
            tenant=tenant,
            account=f"batches of {account}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=asked.metadata or {},
        )
        return JSONResponse((await runner.create(state)).body)

    async def batches(self, request: Request) -> Response:
        """`GET /v1/batches`, the newest first, as pages."""
        found = self._batch_runner().of(tenant_of(request, self._keys))
        return JSONResponse(page(request, [batch.body for batch in found]))

    async def batch(self, request: Request) -> Response:
        """`GET /v1/batches/{id}`."""
        tenant = tenant_of(request, self._keys)
        return JSONResponse(self._batch_runner().get(tenant, request.path_params["batch_id"]).body)

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/batches/{id}/cancel`."""
        tenant = tenant_of(request, self._keys)
        return JSONResponse((await self._batch_runner().cancel(tenant, request.path_params["batch_id"])).body)

    def _file_store(self) -> FileStore:
        if self._files is None:
            raise _unserved()
        return self._files

    def _batch_runner(self) -> BatchRunner:
        if self._runner is None:
            raise _unserved()
        return self._runner


def _unserved() -> NotFound:
    return NotFound("files and batches are not served here: edge.batch.folder is not set", field="edge.batch.folder")


class _Form:
    """An upload's form. Fields may come before the file and after it."""

    def __init__(self, found: AsyncIterator[Part]) -> None:
        self._parts = found
        self._fields: dict[str, str] = {}
        self.filename = ""

    async def file_data(self, files: FileStore, tenant: str) -> tuple[Path, int]:
        """Reads the whole form; what `FileStore.write` returns of its file. Raises InvalidRequest naming the field."""
        written: tuple[Path, int] | None = None
        part = await anext(self._parts, None)
        try:
            while part is not None:
                if isinstance(part, FormField):
                    self._fields[part.name] = part.value
                    part = await anext(self._parts, None)
                    continue
                assert isinstance(part, FileBegins)
                if part.name != "file" or written is not None:
                    raise InvalidRequest(f"{brief(part.name, 40)}: the form has one file, named file", field="file")
                self.filename = part.filename[:MAX_FILENAME_LEN]
                rest = _FileParts(self._parts)
                written = await files.write(tenant, rest)
                part = rest.next
            if written is None:
                raise InvalidRequest("file is missing", field="file")
        except BaseException:
            if written is not None:
                await files.drop(written[0])
            raise
        return written

    def purpose(self) -> str:
        """Raises InvalidRequest (`purpose`)."""
        found = self._fields.get("purpose")
        if found not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", field="purpose")
        return found

    def ttl_s(self) -> float | None:
        """Raises InvalidRequest (`expires_after`)."""
        anchor, seconds = (self._fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return None
        is_number = seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10
        if anchor != "created_at" or not is_number or not LEAST_TTL_S <= int(seconds or 0) <= MOST_TTL_S:
            raise InvalidRequest(
                f"expires_after must have anchor created_at and {LEAST_TTL_S} to {MOST_TTL_S} seconds",
                field="expires_after",
            )
        return float(seconds or 0)


class _FileParts:
    """The pieces of a file whose `FileBegins` was read; at their end `next` is the part that follows."""

    def __init__(self, found: AsyncIterator[Part]) -> None:
        self._parts = found
        self.next: Part | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        part = await anext(self._parts, None)
        if isinstance(part, FileData):
            return part.data
        self.next = part
        raise StopAsyncIteration
