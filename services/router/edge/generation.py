"""One running request seen as text: detokenized, cut at stop strings, with its usage at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from services.router.edge.stop_strings import StopStrings
from services.router.request import (
    FinishReason,
    Request,
    RequestSummary,
    RunningRequest,
    TokenDelta,
    TokenLogprobs,
)
from shared.errors import Cancelled, Internal
from shared.model.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one finished request."""

    num_prompt_tokens: int
    num_output_tokens: int  # up to and with the token that ended the answer
    num_cached_tokens: int  # prompt tokens whose KV was not recomputed


@dataclass(frozen=True, slots=True)
class OutputFinish:
    """How a request ended."""

    reason: FinishReason  # STOP or LENGTH
    stop_reason: str | int | None  # the stop string, or the client's stop token id, that ended it
    usage: Usage
    summary: RequestSummary


class OutputDelta(NamedTuple):
    """New output; `text` is certain by now and may be empty, `finish` is set on the last delta only.

    A tuple, since there is one a token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # as many as token_ids where asked for
    finish: OutputFinish | None = None


class Generation:
    """Iterates one submitted request's output; always `aclose()` it (`contextlib.aclosing`).

    Any failure and any cancellation while it is read frees the request in the cluster before it is raised,
    and a stop string before its delta is returned: what it cut off must not run on. One reader at a time.
    """

    def __init__(self, request: Request, running: RunningRequest, detokenizer: Detokenizer) -> None:
        self.request = request
        self._running = running
        self._source: AsyncIterator[TokenDelta] | None = None
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.sampling.stop) if request.sampling.stop else None
        self._num_output_tokens = 0
        self._ended = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> OutputDelta:
        """The next delta; raises the core's TandemError, Internal where the core ends without saying why."""
        if self._ended:
            await self.aclose()
            raise StopAsyncIteration
        try:
            if self._source is None:
                self._source = aiter(self._running)
            delta = await anext(self._source, None)
            if delta is None:
                raise Internal(f"request {self.request.request_id} ended without a finish reason")
            output = self._convert(delta)
        except asyncio.CancelledError:
            await self.aclose()
            if _is_cancelled():
                raise
            # Not the reader was cancelled but something that it waited for: to the client that is a failure.
            raise Internal(f"request {self.request.request_id} was abandoned by the router") from None
        except BaseException:
            await self.aclose()
            raise
        if output.finish is not None:
            self._ended = True
            if delta.finish_reason is None:
                await self.aclose()
        return output

    async def aclose(self) -> None:
        """Ends the request in the whole cluster, finished or not. Idempotent."""
        self._ended = True
        await self._running.aclose()

    def _convert(self, delta: TokenDelta) -> OutputDelta:
        if delta.finish_reason is FinishReason.CANCELLED:
            raise Cancelled(f"request {self.request.request_id} was cancelled in the cluster")
        # A worker's STOP comes with the end token that caused it: counted, but no text.
        num_visible = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        visible = delta.token_ids[: max(num_visible, 0)]
        if self._stops is not None:
            return self._convert_stopping(delta, visible, self._stops)
        text = self._detokenizer.push(visible)
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return OutputDelta(text, delta.token_ids, delta.logprobs)
        return self._finished(text + self._detokenizer.flush(), delta)

    def _convert_stopping(self, delta: TokenDelta, visible: tuple[int, ...], stops: StopStrings) -> OutputDelta:
        """Token by token, so that the count ends with the token that completed the stop string."""
        certain: list[str] = []
        before = self._num_output_tokens
        for i, token_id in enumerate(visible):
            self._num_output_tokens = before + i + 1
            piece, matched = stops.push(self._detokenizer.push((token_id,)), self._may_stop())
            certain.append(piece)
            if matched is not None:
                return self._stopped("".join(certain), delta, i + 1, matched)
        self._num_output_tokens = before + len(delta.token_ids)
        if delta.finish_reason is None:
            return OutputDelta("".join(certain), delta.token_ids, delta.logprobs)
        piece, matched = stops.push(self._detokenizer.flush(), self._may_stop())
        certain.append(piece)
        if matched is not None:
            return self._stopped("".join(certain), delta, len(delta.token_ids), matched)
        certain.append(stops.flush())
        return self._finished("".join(certain), delta)

    def _may_stop(self) -> bool:
        return self._num_output_tokens >= self.request.sampling.min_tokens

    def _stopped(self, text: str, delta: TokenDelta, num_tokens: int, stop: str) -> OutputDelta:
        """The last delta where a stop string ended the answer; later tokens of the delta are dropped."""
        return OutputDelta(
            text,
            delta.token_ids[:num_tokens],
            delta.logprobs[:num_tokens],
            self._finish(FinishReason.STOP, stop),
        )

    def _finished(self, text: str, delta: TokenDelta) -> OutputDelta:
        """The last delta where the worker ended the answer."""
        assert delta.finish_reason is not None
        stop_reason = None
        if delta.finish_reason is FinishReason.STOP and delta.token_ids:
            last = delta.token_ids[-1]
            stop_reason = last if last in self.request.sampling.stop_token_ids else None
        return OutputDelta(text, delta.token_ids, delta.logprobs, self._finish(delta.finish_reason, stop_reason))

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> OutputFinish:
        summary = self._running.summary
        usage = Usage(self.request.num_prompt_tokens, self._num_output_tokens, summary.num_cached_tokens)
        return OutputFinish(reason, stop_reason, usage, summary)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
