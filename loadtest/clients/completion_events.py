"""The events of a streamed completion, in OpenAI's shape with vLLM's `token_ids` and Tandem's `tandem` member."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from loadtest.clients.base import RequestFailed, failed
from loadtest.records import FailureCause, Reply, TtftSplit


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
