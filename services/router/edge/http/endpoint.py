"""One inference endpoint: from the request's bytes to the last byte of its reply, whichever way it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.router.dispatch.request import FinishReason, Request, Resume
from services.router.edge.access import NOTE
from services.router.edge.http.errors import ErrorShape, as_tandem_error
from services.router.edge.http.openai.parsed_request import BodyWriter, ParsedRequest, StreamWriter
from services.router.edge.http.openai.schemas import ResumedChoice
from services.router.edge.http.server.connection import Reply, check_json_size, ended_by_disconnect, read_body
from services.router.edge.input_processor import CallInfo, InputProcessor, checked_request_id
from services.router.edge.output_stream import OutputStream
from services.router.edge.request_ledger import CallEntry
from services.router.edge.scheduling import scheduling_hints
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys, credentials
from services.router.edge.tenants.rate_limits import Account
from shared.errors import InvalidRequest, TandemError, WorkerLost
from shared.seeds import derived_seed


def sub_requests(prompts: Sequence[Request], n: int) -> list[Request]:
    """`n` requests a prompt, in choice order (prompt by prompt), each with its own id and seed."""
    if len(prompts) * n == 1:
        return list(prompts)
    fanned: list[Request] = []
    for prompt in prompts:
        seed = prompt.sampling.seed
        assert seed is not None, "the input processor resolves seeds"
        for index in range(n):
            fanned.append(
                replace(
                    prompt,
                    request_id=f"{prompt.request_id}-{len(fanned)}",
                    sampling=replace(prompt.sampling, seed=derived_seed(seed, index)),
                )
            )
    return fanned


class Dialect(Protocol):
    """One of the request shapes."""

    @property
    def errors(self) -> ErrorShape:
        """The shape of its errors."""
        ...

    def parse(self, body: bytes) -> ParsedRequest:
        """Raises InvalidRequest naming the field."""
        ...


class InferenceEndpoint:
    """An ASGI application. Frees everything in the cluster when the client leaves, in streams and without."""

    def __init__(
        self, input_processor: InputProcessor, dialect: Dialect, keys: ApiKeys, settings: EdgeSettings
    ) -> None:
        self._input_processor = input_processor
        self._dialect = dialect
        self._keys = keys
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Never raises for what a client or the cluster did."""
        arrived_at = time.perf_counter()
        headers = Headers(scope=scope)
        trace = self._input_processor.traces.begin(
            headers.get("traceparent", ""), headers.get("tracestate", ""), arrived_at
        )
        failure: TandemError | None = None
        reply = Reply(send, checked_request_id(""), self._dialect.errors)
        entry = CallEntry(self._input_processor.ledger, arrived_at)
        try:
            with entry:
                scope[NOTE] = entry.note
                entry.note.request_id = reply.request_id
                entry.note.trace_id = trace.trace_id
                await self._answer(headers, receive, reply, CallInfo(arrived_at=arrived_at, trace=trace), entry)
        except asyncio.CancelledError:
            # Only a server that stops cancels this task: the client gets an error, and the task ends here.
            failure = WorkerLost("the router is shutting down")
            await reply.error(failure)
        except Exception as error:
            failure = as_tandem_error(error, reply.request_id)
            await reply.error(failure)
        finally:
            trace.end(failure, scope["path"], self._input_processor.model_name, entry.note.records)

    async def _answer(self, headers: Headers, receive: Receive, reply: Reply, call: CallInfo, entry: CallEntry) -> None:
        """Lets the request in, and serves it until its end or the client's leaving."""
        note = entry.note
        reply.request_id = note.request_id = checked_request_id(headers.get("x-request-id", ""))
        key = credentials(headers)
        tenant = self._keys.check(key)
        hints = scheduling_hints(headers, tenant)
        note.tenant = hints.tenant
        account = self._input_processor.rates.begin(self._keys.account(key, hints.tenant), hints.tenant)
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        await check_json_size(body, self._settings.limits, self._input_processor.core.max_prompt_tokens())
        parsed = self._dialect.parse(body)
        reply.request_id = note.request_id = checked_request_id(parsed.request_id or reply.request_id)
        note.model = parsed.model or self._input_processor.model_name
        info = replace(
            call,
            model=parsed.model,
            request_id=reply.request_id,
            scheduling=hints if parsed.priority is None else replace(hints, priority=-parsed.priority),
            cache_salt=parsed.cache_salt,
        )
        async with ended_by_disconnect(receive, reply):
            await self._serve(parsed, info, reply, account, entry)

    async def _serve(
        self, parsed: ParsedRequest, info: CallInfo, reply: Reply, account: Account, entry: CallEntry
    ) -> None:
        plan = await self._plan(parsed, info)
        account.charge(sum(request.num_input_tokens for request in plan))
        entry.answers_begin()
        async with self._input_processor.start(plan, entry) as outputs:
            try:
                if parsed.stream:
                    num_open = sum(not request.is_complete for request in plan)
                    await _stream(outputs, num_open, parsed.stream_writer(plan, info.request_id), reply)
                else:
                    await _collect(outputs, parsed.body_writer(plan, info.request_id), reply)
            finally:
                account.charge(outputs.num_output_tokens)

    async def _plan(self, parsed: ParsedRequest, info: CallInfo) -> Sequence[Request]:
        """All sub-requests, validated, before any of them starts."""
        num_choices = len(parsed.prompts) * parsed.n
        if num_choices > self._settings.max_choices:
            raise InvalidRequest(
                f"n: {num_choices} answers (prompts times n) are more than {self._settings.max_choices}",
                field="n",
                limit=self._settings.max_choices,
                value=num_choices,
            )
        prepared = [
            await self._input_processor.prepare(
                prompt, parsed.sampling, info, parsed.default_max_tokens, parsed.options
            )
            for prompt in parsed.prompts
        ]
        plan = sub_requests(prepared, parsed.n)
        if not parsed.resumed:
            return plan
        if len(parsed.resumed) != num_choices:
            raise InvalidRequest(
                f"resume.choices must have {num_choices} entries, one a choice, got {len(parsed.resumed)}",
                field="resume.choices",
                limit=num_choices,
                value=len(parsed.resumed),
            )
        return [await self._resumed(request, had) for request, had in zip(plan, parsed.resumed, strict=True)]

    async def _resumed(self, request: Request, had: ResumedChoice) -> Request:
        ended = None if had.finish_reason is None else FinishReason(had.finish_reason)
        resume = Resume(tuple(had.token_ids), had.num_chars, ended)
        return await self._input_processor.resumed(request, resume, had.seed)


async def _stream(
    outputs: OutputStream,
    num_open: int,
    writer: StreamWriter,
    reply: Reply,
) -> None:
    """The head goes out with the first delta: until then an error still has its own status. `num_open`: choices that
    are still to end."""
    if not num_open:
        await reply.open_stream()
        await reply.events(writer.closing(), last=True)
        return
    async for index, delta in outputs:
        if not reply.streaming:
            await reply.open_stream()
        events = writer.events(index, delta)
        if delta.finish is not None:
            num_open -= 1
            if num_open == 0:
                await reply.events(events + writer.closing(), last=True)
                return
        if events:
            await reply.events(events)


async def _collect(outputs: OutputStream, writer: BodyWriter, reply: Reply) -> None:
    async for index, delta in outputs:
        writer.add(index, delta)
    await reply.json(writer.body())
