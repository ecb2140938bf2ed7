"""OpenAI's `POST /v1/completions`, streamed, with prompts as token ids."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from typing import Any

from pydantic_core import from_json

from loadtest.clients.base import Call, CauseLine, RequestFailed, TargetInfo, failed
from loadtest.clients.http_connection import ConnectionPool, Response
from loadtest.clients.target import Target
from loadtest.records import FailureCause, Reply, TtftSplit

STATUS_TIMEOUT_S = 10.0
"""For what is asked beside the requests: the models, and what requests were lost to."""


class EventParser:
    """Splits a byte stream into events, for any chunking."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes; comments and other fields are dropped."""
        if (
            chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and chunk.find(b"\n") == len(chunk) - 2
            and not (self._rest or self._data)
        ):
            # Fast path: servers send one event at a time, and networks seldom split it.
            return [chunk[6:-2]]
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events


_SPLIT_FIELDS = frozenset(TtftSplit.__dataclass_fields__)


class CompletionEvents:
    """Fills a Reply from the body of one response; raises RequestFailed for an error event.

    It uses pydantic's JSON parser, several times faster than the standard library's, which was half of an event's cost.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._parser = EventParser()
        self._done = False

    def feed(self, at_s: float, chunk: bytes) -> None:
        """Takes a piece of the body that was received at `at_s`."""
        for data in self._parser.feed(chunk):
            if data == b"[DONE]":
                self._done = True
                continue
            try:
                event = from_json(data)
            except ValueError as error:
                raise failed(FailureCause.PROTOCOL, f"an event is not JSON: {error}") from error
            if not isinstance(event, dict):
                raise failed(FailureCause.PROTOCOL, "an event is not a JSON object")
            try:
                self._take(at_s, event)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise failed(
                    FailureCause.PROTOCOL, f"an event is not a completion: {type(error).__name__}: {error}"
                ) from error

    def check_complete(self) -> None:
        """Raises RequestFailed if the body ended before the answer did, or if its length is unknown."""
        reply = self._reply
        if not reply.finish_reason and not self._done:
            raise failed(FailureCause.DISCONNECTED, "the stream ended before the answer did")
        if not reply.token_times_s:
            raise failed(FailureCause.PROTOCOL, "the answer has no tokens")
        if not reply.counts_exact and reply.num_output_tokens is None:
            raise failed(
                FailureCause.PROTOCOL, "the server sends neither token_ids nor usage: tokens cannot be counted"
            )

    def _take(self, at_s: float, event: dict[str, Any]) -> None:
        if event.get("error"):
            raise error_failure(0, event)
        for choice in event.get("choices") or ():
            self._take_choice(at_s, choice)
        if usage := event.get("usage"):
            self._reply.num_prompt_tokens = int(usage["prompt_tokens"])
            self._reply.num_output_tokens = int(usage.get("completion_tokens", 0))
            details = usage.get("prompt_tokens_details") or {}
            if details.get("cached_tokens") is not None:
                self._reply.num_cached_tokens = int(details["cached_tokens"])
        if extension := event.get("tandem"):
            self._reply.prefill_worker = str(extension.get("prefill_worker", ""))
            self._reply.decode_worker = str(extension.get("decode_worker", ""))
            parts = extension.get("ttft") or {}
            self._reply.split = TtftSplit(**{k: float(v) for k, v in parts.items() if k in _SPLIT_FIELDS})

    def _take_choice(self, at_s: float, choice: dict[str, Any]) -> None:
        token_ids = choice.get("token_ids")
        if token_ids:
            self._reply.add_tokens(at_s, token_ids)
        elif token_ids is None and choice.get("text"):
            self._reply.counts_exact = False
            self._reply.token_times_s.append(at_s)
            self._reply.token_counts.append(1)
        if reason := choice.get("finish_reason"):
            self._reply.finish_reason = str(reason)


def error_failure(status: int, body: object, retry: str = "") -> RequestFailed:
    """Classifies an error by HTTP status, or by OpenAI's error type if it came mid-stream (status 0)."""
    error = body.get("error", body) if isinstance(body, dict) else body
    fields = error if isinstance(error, dict) else {"message": str(error)}
    message = str(fields.get("message") or f"HTTP {status}")
    kind = str(fields.get("code") or fields.get("type") or status)
    error_type = str(fields.get("type") or "")
    if status == 429 or (not status and error_type == "rate_limit_error"):
        cause = FailureCause.OVERLOADED
        message += f" (retry after {retry} s)" if retry else ""
    elif status in (408, 504) or (not status and error_type == "timeout_error"):
        cause = FailureCause.DEADLINE
    elif 400 <= status < 500 or (not status and error_type == "invalid_request_error"):
        cause = FailureCause.REJECTED
    else:
        cause = FailureCause.SERVER_ERROR
    return failed(cause, message, kind)


class HttpClient:
    """A Client for any server with OpenAI's completions API that accepts token ids."""

    def __init__(self, target: Target, model: str = "", api_key: str = "") -> None:
        """`model` empty: the first that the target lists."""
        tls = ssl.create_default_context() if target.scheme == "https" else None
        self._pool = ConnectionPool(target.host, target.port, tls)
        self._path = target.path
        self._model = model
        self._headers = f"Host: {target.address}\r\nUser-Agent: tandem-loadtest\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def start(self) -> TargetInfo:
        """Queries the served models, which also checks that the target is up."""
        response = await self._get(f"{self._path}/v1/models")
        if response.status != 200:
            if self._model and response.status == 404:
                return TargetInfo(self._model)  # a server without that list
            raise _refusal(response)
        try:
            served = [str(entry["id"]) for entry in json.loads(response.body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise failed(FailureCause.PROTOCOL, f"{self._path}/v1/models is not a list of models") from error
        if not self._model:
            if not served:
                raise failed(FailureCause.PROTOCOL, "the target lists no model: name one with --model")
            self._model = served[0]
        return TargetInfo(self._model)

    def encode(self, call: Call) -> bytes:
        """The complete request, head and body."""
        body = json.dumps(
            {
                "model": call.model or self._model,
                "prompt": call.token_ids,
                "max_tokens": call.max_tokens,
                "temperature": 0,
                "ignore_eos": call.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        ).encode()
        head = (
            f"POST {self._path}/v1/completions HTTP/1.1\r\n{self._headers}"
            "Accept: text/event-stream\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {call.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def generate(self, payload: bytes, reply: Reply) -> None:
        """See Client."""
        events = CompletionEvents(reply)

        def on_sent(at_s: float) -> None:
            reply.sent_s = at_s

        try:
            response = await self._pool.exchange(payload, events.feed, on_sent)
        finally:
            reply.closed_s = time.perf_counter()
        if response.status != 200:
            raise _refusal(response)
        events.check_complete()

    async def causes(self, window_s: float) -> tuple[CauseLine, ...]:
        """See Client."""
        try:
            response = await self._get(f"{self._path}/status?window_s={min(max(window_s, 1.0), 3600.0):.0f}")
            lines = json.loads(response.body)["window"]["causes"]
            return tuple(CauseLine(**{name: line[name] for name in CauseLine.__dataclass_fields__}) for line in lines)
        except (RequestFailed, ValueError, KeyError, TypeError):
            return ()  # another server's

    async def close(self) -> None:
        """Drops all connections."""
        self._pool.close()

    async def _get(self, path: str) -> Response:
        request = f"GET {path} HTTP/1.1\r\n{self._headers}Accept: application/json\r\n\r\n"
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._pool.exchange(request.encode())
        except TimeoutError:
            raise failed(FailureCause.TIMEOUT, f"no answer to GET {path} within {STATUS_TIMEOUT_S:g} s") from None


def _refusal(response: Response) -> RequestFailed:
    try:
        body: object = json.loads(response.body)
    except ValueError:
        body = response.body[:200].decode("utf-8", "replace") or f"HTTP {response.status}"
    return error_failure(response.status, body, response.headers.get("retry-after", ""))
