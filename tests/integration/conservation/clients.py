"""Clients within the router's process: they call ASGI and the servicer, read, leave early, and add up what they got."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field


@dataclass
class Seen:
    """What a client knows of its call."""

    left: bool = False
    status: int = 0
    code: str = ""
    """Of an error."""
    reasons: list[str] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0


async def over_http(app, path: str, body: bytes, headers: dict[str, str], leave_after: int | None = None) -> Seen:
    """One HTTP request; a client that leaves does so once it has got that many events."""
    seen, chunks, gone, asked = Seen(), [], asyncio.Event(), False
    if leave_after == 0:
        gone.set()

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        seen.left = True
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            seen.status = message["status"]
            return
        chunks.append(message.get("body", b""))
        if leave_after is not None and len(chunks) >= leave_after:
            gone.set()
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    gone.set()
    _read(seen, b"".join(chunks))
    return seen


def _read(seen: Seen, data: bytes) -> None:
    if data.startswith(b"data: "):
        parts = [json.loads(line[6:]) for line in data.split(b"\n\n") if line and line != b"data: [DONE]"]
    else:
        parts = [json.loads(data)] if data else []
    for part in parts:
        if "error" in part:
            seen.code = part["error"]["code"]
        for choice in part.get("choices", ()):
            if choice.get("finish_reason"):
                seen.reasons.append(choice["finish_reason"])
        if part.get("usage"):
            seen.num_prompt = part["usage"]["prompt_tokens"]
            seen.num_output = part["usage"]["completion_tokens"]
            seen.num_cached = (part["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Aborted(Exception):
    """The servicer ended the call."""


class Context:
    """What a servicer sees of a call."""

    def __init__(self, metadata: dict[str, str], leave_after: int | None) -> None:
        self._metadata = tuple(metadata.items())
        self._leave_after = leave_after
        self.written: list = []
        self.code = None
        self.task: asyncio.Task | None = None

    def invocation_metadata(self):
        return self._metadata

    def time_remaining(self):
        return None

    async def write(self, message) -> None:
        self.written.append(message)
        if self._leave_after is not None and len(self.written) >= self._leave_after:
            self.task.cancel()
        await asyncio.sleep(0)

    async def abort(self, code, message, trailers) -> None:
        self.code = code
        raise Aborted


async def over_grpc(servicer, request, metadata: dict[str, str], leave_after: int | None = None) -> Seen:
    """One Generate call."""
    context, seen = Context(metadata, leave_after), Seen()
    context.task = asyncio.create_task(servicer.Generate(request, context))
    if leave_after == 0:
        asyncio.get_running_loop().call_soon(context.task.cancel)
    await asyncio.wait((context.task,))
    if context.task.cancelled():
        seen.left = True
    elif context.task.exception() is not None:
        assert isinstance(context.task.exception(), Aborted), context.task.exception()
        seen.code = context.code.name
    for response in context.written:
        if response.finish_reason:
            seen.reasons.append({1: "stop", 2: "length"}[response.finish_reason])
            seen.num_prompt = response.usage.num_prompt_tokens
            seen.num_output = response.usage.num_output_tokens
            seen.num_cached = response.usage.num_cached_tokens
    return seen
