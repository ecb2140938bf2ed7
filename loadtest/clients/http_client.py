"""OpenAI's `POST /v1/completions`, streamed, with prompts as token ids."""

from __future__ import annotations

import json
import ssl
import time

from loadtest.clients.base import Call, CauseLine, RequestFailed, TargetInfo, failed
from loadtest.clients.completion_events import CompletionEvents, error_failure
from loadtest.clients.http_connection import ConnectionPool, Response
from loadtest.clients.target import Target
from loadtest.records import FailureCause, Reply


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
        request = f"GET {self._path}/v1/models HTTP/1.1\r\n{self._headers}Accept: application/json\r\n\r\n"
        response = await self._pool.exchange(request.encode())
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
                "model": self._model,
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
        path = f"{self._path}/status?window_s={min(max(window_s, 1.0), 3600.0):.0f}"
        request = f"GET {path} HTTP/1.1\r\n{self._headers}Accept: application/json\r\n\r\n"
        try:
            response = await self._pool.exchange(request.encode())
            lines = json.loads(response.body)["window"]["causes"]
            return tuple(CauseLine(**{name: line[name] for name in CauseLine.__dataclass_fields__}) for line in lines)
        except (RequestFailed, ValueError, KeyError, TypeError):
            return ()  # another server's

    async def close(self) -> None:
        """Drops all connections."""
        self._pool.close()


def _refusal(response: Response) -> RequestFailed:
    try:
        body: object = json.loads(response.body)
    except ValueError:
        body = response.body[:200].decode("utf-8", "replace") or f"HTTP {response.status}"
    return error_failure(response.status, body, response.headers.get("retry-after", ""))
