"""One inference endpoint: from the request's bytes to the last byte of its reply, whichever way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.router.dispatch.request import Request, Resume
from services.router.edge.access import NOTE
from services.router.edge.http.best_answers import best_answers
from services.router.edge.http.bodies import BodyTooLargeError, check_json_size, read_body
from services.router.edge.http.errors import ErrorShape, as_tandem_error, error_headers
from services.router.edge.input_processor import CallInfo, InputProcessor, PromptOptions, checked_request_id
from services.router.edge.output_stream import OutputDelta, OutputStream
from services.router.edge.request_ledger import CallEntry, CallNote
from services.router.edge.scheduling import SchedulingHints
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import CALLER, ApiKeys, Caller, identified
from services.router.edge.tenants.rate_limits import Account
from services.router.edge.text.prompt_tokenizer import Prompt
from shared.engine.sampling_params import SamplingParams
from shared.errors import Cancelled, InvalidRequest, TandemError, WorkerLost
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


class StreamWriter(Protocol):
    """Turns deltas into server-sent events."""

    def events(self, index: int, delta: OutputDelta) -> bytes:
        """The events for choice `index`'s delta; empty where it brings nothing to send."""
        ...

    def closing(self) -> bytes:
        """The events behind the last choice's end, [DONE] included."""
        ...


class BodyWriter(Protocol):
    """Collects deltas into one JSON body."""

    def add(self, index: int, delta: OutputDelta) -> None:
        """Takes choice `index`'s next delta."""
        ...

    def body(self) -> bytes:
        """The response, once every choice has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedRequest(ABC):
    """One request to an endpoint. Each endpoint's own subclass knows how to write its replies."""

    prompts: Sequence[Prompt]
    n: int  # answers a prompt
    num_computed: int  # of which they are the best; the beams of a search
    sampling: SamplingParams
    default_max_tokens: int | None
    options: PromptOptions
    session: str  # what calls with one prefix share; empty: the header's, if there is one
    priority: int | None  # vLLM's: lower goes first; None: the header's
    retain_s: float | None  # None: the header's
    model: str
    cache_salt: str  # empty: none
    request_id: str  # empty: the header's, or drawn
    stream: bool
    resumed: Sequence[tuple[Resume, int | None]]  # had of each choice, and its seed; empty: none was begun

    @abstractmethod
    def stream_writer(self, plan: Sequence[Request], request_id: str) -> StreamWriter:
        """Writes the reply as events; `plan` holds the sub-requests in choice order, `request_id` is the base id."""

    @abstractmethod
    def body_writer(self, plan: Sequence[Request], request_id: str) -> BodyWriter:
        """Writes the reply as one body."""


class Dialect(Protocol):
    """One of the request shapes."""

    @property
    def errors(self) -> ErrorShape:
        """The shape of its errors."""
        ...

    def parse(self, body: bytes) -> ParsedRequest:
        """Raises InvalidRequest naming the field."""
        ...


class Reply:
    """What goes back to the client: one JSON body, or an event stream."""

    def __init__(self, send: Send, request_id: str, errors: ErrorShape) -> None:
        self._send = send
        self._errors = errors
        self.request_id = request_id
        self.streaming = False
        """Whether the head of an event stream is out: from then on an error can only be an event."""
        self.done = False
        """Whether the reply is complete."""

    async def json(self, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Sends a complete JSON response."""
        self.done = True
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def open_stream(self) -> None:
        """Sends the head of an event stream."""
        self.streaming = True
        head = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # reverse proxies: pass every event on at once
            (b"x-request-id", self.request_id.encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def events(self, data: bytes, last: bool = False) -> None:
        """Sends ready-made events; `last` ends the response."""
        self.done = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def error(self, error: TandemError) -> None:
        """Sends an error: by status before the first byte, in mid-stream as the last event (no [DONE])."""
        if self.done:
            return
        if self.streaming:
            await self.events(self._errors.event(error), last=True)
        else:
            headers = error_headers(error)
            if isinstance(error, BodyTooLargeError):  # the rest of the body is dropped, and nothing can come behind it
                headers = [*headers, (b"connection", b"close")]
            await self.json(self._errors.body(error), error.http_status, headers)


@contextlib.asynccontextmanager
async def ended_by_disconnect(receive: Receive, reply: Reply) -> AsyncIterator[None]:
    """Cancels the body of the `async with` when the client goes away, and raises Cancelled then.

    Needs the request's body to have been read, and no other caller of `receive` meanwhile.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not reply.done:  # a server says "disconnect" after a complete reply, too
            gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise Cancelled("the client went away") from None
    finally:
        watcher.cancel()


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
                call = CallInfo(arrived_at=arrived_at, trace=trace)
                await self._answer(headers, receive, reply, call, entry, scope.get(CALLER))
        except asyncio.CancelledError:
            # Only a server that stops cancels this task: the client gets an error, and the task ends here.
            failure = WorkerLost("the router is shutting down")
            await reply.error(failure)
        except Exception as error:
            failure = as_tandem_error(error, reply.request_id)
            await reply.error(failure)
        finally:
            trace.end(failure, scope["path"], self._input_processor.model_name, entry.note.records)

    async def _answer(
        self,
        headers: Headers,
        receive: Receive,
        reply: Reply,
        call: CallInfo,
        entry: CallEntry,
        caller: Caller | None,
    ) -> None:
        """Lets the request in, and serves it until its end or the client's leaving. `caller`: it comes from within."""
        note = entry.note
        reply.request_id = note.request_id = checked_request_id(headers.get("x-request-id", ""))
        hints, whose = identified(headers, self._keys, caller)
        note.tenant = hints.tenant
        account = self._input_processor.rates.begin(whose, hints.tenant)
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        await check_json_size(body, self._settings.limits, self._input_processor.core.max_prompt_tokens())
        # A request may wait before it is begun, for what it refers to.
        async with ended_by_disconnect(receive, reply):
            parsed = await self._parsed(body, hints.tenant)
            info = self._known(parsed, hints, reply, call, entry.note, caller)
            await self._serve(parsed, info, reply, account, entry)

    def _known(
        self,
        parsed: ParsedRequest,
        hints: SchedulingHints,
        reply: Reply,
        call: CallInfo,
        note: CallNote,
        caller: Caller | None,
    ) -> CallInfo:
        """What the parsed request adds to what its headers say."""
        reply.request_id = note.request_id = checked_request_id(parsed.request_id or reply.request_id)
        note.model = parsed.model or self._input_processor.model_name
        if parsed.priority is not None and caller is None:
            hints = replace(hints, priority=-parsed.priority)
        if parsed.retain_s is not None:
            hints = replace(hints, retain_s=parsed.retain_s)
        if parsed.session and not hints.session:
            hints = replace(hints, session=parsed.session)
        return replace(
            call,
            model=parsed.model,
            request_id=reply.request_id,
            scheduling=hints,
            cache_salt=parsed.cache_salt,
        )

    async def _serve(
        self, parsed: ParsedRequest, info: CallInfo, reply: Reply, account: Account, entry: CallEntry
    ) -> None:
        await self._run(parsed, await self._plan(parsed, info), info, reply, account, entry)

    async def _run(
        self,
        parsed: ParsedRequest,
        plan: Sequence[Request],
        info: CallInfo,
        reply: Reply,
        account: Account,
        entry: CallEntry,
    ) -> None:
        account.charge(sum(request.num_input_tokens for request in plan))
        entry.answers_begin()
        async with self._input_processor.start(plan, entry) as outputs:
            try:
                if parsed.stream:
                    stream = parsed.stream_writer(plan, info.request_id)
                    ended = functools.partial(self._ended, parsed, stream)
                    num_open = sum(not request.is_complete for request in plan)
                    await _stream(outputs, num_open, stream, reply, ended)
                else:
                    writer = await self._written(parsed, plan, info, outputs)
                    body = writer.body()
                    await self._ended(parsed, writer)
                    await reply.json(body)
            finally:
                account.charge(outputs.num_output_tokens)

    async def _written(
        self, parsed: ParsedRequest, plan: Sequence[Request], info: CallInfo, outputs: OutputStream
    ) -> BodyWriter:
        """Collects all answers, or the best of each prompt."""
        if parsed.num_computed == parsed.n and parsed.sampling.beams is None:
            writer = parsed.body_writer(plan, info.request_id)
            async for index, delta in outputs:
                writer.add(index, delta)
            return writer
        best = await best_answers(outputs, plan, parsed.num_computed, parsed.n, self._input_processor.tokenizer)
        writer = parsed.body_writer([request for request, _ in best], info.request_id)
        for index, (_, deltas) in enumerate(best):
            for delta in deltas:
                writer.add(index, delta)
        return writer

    async def _parsed(self, body: bytes, tenant: str) -> ParsedRequest:  # noqa: ARG002 - of what it refers to
        """The request; raises InvalidRequest naming the field."""
        return self._dialect.parse(body)

    async def _ended(self, parsed: ParsedRequest, writer: StreamWriter | BodyWriter) -> None:
        """The answer is complete, and its client has not been sent the end."""

    async def _plan(self, parsed: ParsedRequest, info: CallInfo) -> Sequence[Request]:
        """All sub-requests, validated, before any of them starts."""
        num_choices = len(parsed.prompts) * parsed.num_computed
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
        plan = sub_requests(prepared, 1 if parsed.sampling.beams is not None else parsed.num_computed)
        if not parsed.resumed:
            return plan
        if len(parsed.resumed) != num_choices:
            raise InvalidRequest(
                f"resume.choices must have {num_choices} entries, one a choice, got {len(parsed.resumed)}",
                field="resume.choices",
                limit=num_choices,
                value=len(parsed.resumed),
            )
        return [
            await self._input_processor.resumed(request, resume, seed)
            for request, (resume, seed) in zip(plan, parsed.resumed, strict=True)
        ]


async def _stream(
    outputs: OutputStream,
    num_open: int,
    writer: StreamWriter,
    reply: Reply,
    ended: Callable[[], Awaitable[None]],
) -> None:
    """The head goes out with the first delta: until then an error still has its own status. `num_open`: choices that
    are still to end; `ended` is called before the end goes out."""
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
                events += writer.closing()
                await ended()
                await reply.events(events, last=True)
                return
        if events:
            await reply.events(events)
