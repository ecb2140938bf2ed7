"""One inference endpoint: from the request's bytes to the last byte of its reply, whichever way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.router.edge.auth import ApiKeys
from services.router.edge.fan_out import interleave, sub_requests
from services.router.edge.generation import Generation, OutputDelta
from services.router.edge.http.call import BodyWriter, Call, StreamWriter
from services.router.edge.http.connection import BodyTooLargeError, Reply, ended_by_disconnect, read_body
from services.router.edge.http.errors import as_tandem_error
from services.router.edge.input_processor import CallInfo, InputProcessor, checked_request_id
from services.router.edge.scheduling import scheduling_hints
from services.router.edge.settings import EdgeSettings
from services.router.request import Request
from shared.errors import InvalidRequest, WorkerLost

_TRACE_HEADERS = ("traceparent", "tracestate")


class Dialect(Protocol):
    """One of OpenAI's request shapes."""

    def parse(self, body: bytes) -> Call:
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
        reply = Reply(send, checked_request_id(""))
        try:
            reply.request_id = checked_request_id(headers.get("x-request-id", ""))
            tenant = self._keys.check(headers.get("authorization"))
            call = self._dialect.parse(await read_body(receive, headers, self._settings.max_body_bytes))
            reply.request_id = checked_request_id(call.request_id or reply.request_id)
            info = CallInfo(
                model=call.model,
                request_id=reply.request_id,
                arrived_at=arrived_at,
                trace={name: headers[name] for name in _TRACE_HEADERS if name in headers},
                scheduling=scheduling_hints(headers, tenant),
                cache_salt=call.cache_salt,
            )
            async with ended_by_disconnect(receive, reply):
                await self._serve(call, info, reply)
        except asyncio.CancelledError:
            # Only a server that stops cancels this task: the client hears of it, and the task ends here.
            await reply.error(WorkerLost("the router is shutting down"))
        except BodyTooLargeError as error:
            await reply.error(error.error, status=413)
        except Exception as error:
            await reply.error(as_tandem_error(error, reply.request_id))

    async def _serve(self, call: Call, info: CallInfo, reply: Reply) -> None:
        plan = await self._plan(call, info)
        async with contextlib.AsyncExitStack() as stack:
            generations: list[Generation] = []
            for request in plan:
                generation = self._input_processor.start(request)
                stack.push_async_callback(generation.aclose)
                generations.append(generation)
            deltas = await stack.enter_async_context(contextlib.aclosing(interleave(generations)))
            if call.stream:
                await _stream(deltas, len(plan), call.stream_writer(plan, info.request_id), reply)
            else:
                await _collect(deltas, call.body_writer(plan, info.request_id), reply)

    async def _plan(self, call: Call, info: CallInfo) -> Sequence[Request]:
        """All sub-requests, validated, before any of them starts."""
        num_choices = len(call.prompts) * call.n
        if num_choices > self._settings.max_choices:
            raise InvalidRequest(
                f"n: {num_choices} answers (prompts times n) are more than {self._settings.max_choices}",
                field="n",
                limit=self._settings.max_choices,
                value=num_choices,
            )
        prepared = [
            await self._input_processor.prepare(prompt, call.sampling, info, call.default_max_tokens)
            for prompt in call.prompts
        ]
        return sub_requests(prepared, call.n)


async def _stream(
    deltas: AsyncGenerator[tuple[int, OutputDelta], None],
    num_choices: int,
    writer: StreamWriter,
    reply: Reply,
) -> None:
    """The head goes out with the first delta: until then an error still has its own status."""
    num_open = num_choices
    async for index, delta in deltas:
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


async def _collect(deltas: AsyncGenerator[tuple[int, OutputDelta], None], writer: BodyWriter, reply: Reply) -> None:
    async for index, delta in deltas:
        writer.add(index, delta)
    await reply.json(writer.body())
