"""The output of one client call: its answers' tokens as they come from the core, and as text for the reply."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from services.router.dispatch.record import FINISHED, RequestRecord
from services.router.dispatch.request import (
    Core,
    FinishReason,
    FoundAnswer,
    Request,
    Resume,
    RunningRequest,
    TokenDelta,
    TokenLogprobs,
)
from services.router.edge.request_ledger import Ledger, Uncounted, outcome_of
from services.router.edge.text.stop_strings import StopStrings
from shared.errors import Cancelled, Internal, InvalidRequest
from shared.model.text.tokenizer import Detokenizer, Tokenizer

INLINE_TOKENS = 256
"""As many are detokenized on the event loop, in a few milliseconds at most."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one finished request."""

    num_prompt_tokens: int
    num_output_tokens: int  # up to and including the token that ended the answer
    num_cached_tokens: int  # prompt tokens whose KV was not recomputed
    num_guessed_tokens: int = 0  # that speculation guessed and had checked
    num_accepted_tokens: int = 0  # of these, right ones, which became output tokens


@dataclass(frozen=True, slots=True)
class OutputFinish:
    """How an answer ended."""

    reason: FinishReason  # STOP or LENGTH
    stop_reason: str | int | None  # the stop string, or the client's stop token id, that ended it
    usage: Usage
    record: RequestRecord = field(compare=False)


def resumed_finish(request: Request) -> OutputFinish:
    """How an answer ended that the client has as a whole from an earlier call."""
    assert request.resume is not None
    assert request.resume.finish_reason is not None
    usage = Usage(request.num_prompt_tokens, len(request.resume.token_ids), num_cached_tokens=0)
    return OutputFinish(request.resume.finish_reason, None, usage, request.new_record())


class OutputDelta(NamedTuple):
    """New output; `text` is final and may be empty, `finish` is set on the last delta only.

    A tuple, since there is one for each token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # as many as token_ids where asked for
    finish: OutputFinish | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # on the first delta where asked for: from the second token on
    beams: tuple[FoundAnswer, ...] = ()  # of a beam search, whose only delta has neither text nor tokens


async def output_processor(request: Request, record: RequestRecord, tokenizer: Tokenizer) -> OutputProcessor:
    """One for the request, whose record is `record`; a long resumed answer is replayed beside the event loop, which
    serves others meanwhile. Raises like the class."""
    detokenizer = tokenizer.stream(request.text.skip_special_tokens, request.text.kept_special)
    if len(request.resumed_token_ids) <= INLINE_TOKENS:
        return OutputProcessor(request, record, detokenizer)
    return await asyncio.to_thread(OutputProcessor, request, record, detokenizer)


class OutputProcessor:
    """Converts one answer's token deltas, in order. After a delta with `finish` it is used up."""

    def __init__(self, request: Request, record: RequestRecord, detokenizer: Detokenizer) -> None:
        """Raises InvalidRequest (`resume.token_ids`) where the resumed tokens hold a whole stop string."""
        self._request = request
        self._record = record
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.sampling.stop) if request.sampling.stop else None
        self._includes_stop = request.text.include_stop
        self._num_output_tokens = 0
        self._owed, self._surplus = "", 0  # of the resumed text: what the client lacks, or has beyond it in characters
        if request.resume is not None:
            self._replay(request.resume)

    def _replay(self, resume: Resume) -> None:
        """Brings the text to where an earlier call left it: characters and stop strings may straddle the cut."""
        certain: list[str] = []
        for i, token_id in enumerate(resume.token_ids):
            self._num_output_tokens = i + 1
            piece, matched = self._detokenizer.push((token_id,)), None
            if self._stops is not None:
                piece, matched = self._stops.push(piece, self._may_stop())
            if matched is not None:
                raise InvalidRequest(
                    f"resume.token_ids: stop string {matched!r} is complete at token {i + 1}, the answer has ended",
                    field="resume.token_ids",
                    limit=i + 1,
                )
            certain.append(piece)
        text = "".join(certain)
        if resume.num_chars is not None:
            self._owed, self._surplus = text[resume.num_chars :], max(0, resume.num_chars - len(text))

    def outputs(self, delta: TokenDelta) -> list[OutputDelta]:
        """As `process`, one for each token where the request asks for that; none behind the end of the answer."""
        found: list[OutputDelta] = []
        for part in delta.by_token() if self._request.text.is_by_token else (delta,):
            found.append(self.process(part))
            if found[-1].finish is not None:
                break
        return found

    def process(self, delta: TokenDelta) -> OutputDelta:
        """The delta as text. `finish` without the delta's own finish reason means that a stop string ended the answer:
        the request still runs and must be ended. Raises Cancelled where the cluster cancelled the request."""
        output = self._process(delta)
        if delta.beams:
            return output._replace(beams=delta.beams)
        if delta.prompt_logprobs:
            output = output._replace(prompt_logprobs=delta.prompt_logprobs)
        if not self._owed and not self._surplus:
            return output
        text, self._owed = self._owed + output.text, ""
        kept = text[self._surplus :]
        self._surplus -= len(text) - len(kept)
        return output._replace(text=kept)

    def _process(self, delta: TokenDelta) -> OutputDelta:
        if delta.finish_reason is FinishReason.CANCELLED:
            raise Cancelled(f"request {self._request.request_id} was cancelled in the cluster")
        # A worker's STOP comes with the end token that caused it: counted, but no text.
        num_visible = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        if self._includes_stop and num_visible < len(delta.token_ids):
            num_visible += delta.token_ids[-1] in self._request.sampling.stop_token_ids
        visible = delta.token_ids[: max(num_visible, 0)]
        if self._stops is not None:
            return self._process_with_stops(delta, visible, self._stops)
        text = self._detokenizer.push(visible)
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return OutputDelta(text, delta.token_ids, delta.logprobs)
        return self._finished(text + self._detokenizer.flush(), delta)

    def _process_with_stops(self, delta: TokenDelta, visible: tuple[int, ...], stops: StopStrings) -> OutputDelta:
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
        return self._num_output_tokens >= self._request.sampling.min_tokens

    def _stopped(self, text: str, delta: TokenDelta, num_tokens: int, stop: str) -> OutputDelta:
        """The last delta where a stop string ended the answer; later tokens of the delta are dropped."""
        return OutputDelta(
            text + stop if self._includes_stop else text,
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
            stop_reason = last if last in self._request.sampling.stop_token_ids else None
        return OutputDelta(text, delta.token_ids, delta.logprobs, self._finish(delta.finish_reason, stop_reason))

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> OutputFinish:
        record = self._record
        usage = Usage(
            self._request.num_prompt_tokens,
            self._num_output_tokens,
            record.num_cached_tokens,
            record.num_guessed_tokens,
            min(record.num_accepted_tokens, self._num_output_tokens),  # a stop string may have cut some off
        )
        return OutputFinish(reason, stop_reason, usage, self._record)


@dataclass(slots=True, eq=False)
class _Answer:
    index: int
    request: Request
    running: RunningRequest
    processor: OutputProcessor
    num_tokens: int = 0  # given to the client
    finish: OutputFinish | None = None  # its last delta was made, and is not counted yet


class OutputStream:
    """Iterates (choice index, delta), each choice in its own order; the first failure ends all of them.

    An asynchronous context manager: entering submits the requests, leaving frees them in the whole cluster, finished
    or not. A request whose answer a stop string ended is freed before that delta is returned, and all are freed before
    an error is raised. Each request is counted once: where the reader comes back after its last delta, having passed
    that on, else with what ended the stream. One reader at a time.
    """

    def __init__(
        self, core: Core, requests: Sequence[Request], tokenizer: Tokenizer, ledger: Ledger | None = None
    ) -> None:
        """One choice a request, in order. Nothing comes of a choice that the client has as a whole already."""
        self._ledger: Ledger = ledger or Uncounted()
        self._records = [request.new_record() for request in requests]
        self._uncounted = set(range(len(requests)))
        self._core = core
        self._requests = requests
        self._tokenizer = tokenizer
        self._answers: list[_Answer] = []
        self._open: list[_Answer] = []  # those without their last delta
        self._given: _Answer | None = None  # its last delta was returned: the reader passes it on
        self._ready: deque[tuple[int, OutputDelta]] = deque()
        self._error: BaseException | None = None  # behind what is ready

    async def __aenter__(self) -> Self:
        """Submits all requests; raises what `Core.submit` does, and frees those already submitted then."""
        try:
            wanted = [(index, request) for index, request in enumerate(self._requests) if not request.is_complete]
            processors = [
                await output_processor(request, self._records[index], self._tokenizer) for index, request in wanted
            ]
            for (index, request), processor in zip(wanted, processors, strict=True):
                running = self._core.submit(request, self._records[index])
                self._answers.append(_Answer(index, request, running, processor))
        except BaseException as error:
            await self._end(error)
            raise
        for index, request in enumerate(self._requests):
            if request.resume is not None and request.is_complete:
                self._count(index, FINISHED, request.resume.finish_reason)
        self._open = list(self._answers)
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        await self._end(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        """The next delta. Raises the core's TandemError; Internal where the core ends an answer without a reason."""
        self._passed_on()
        try:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if not self._open:
                    raise StopAsyncIteration
                reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                for answer in self._open:
                    answer.running.notify(reader)
                await reader
                for answer in self._take():
                    await answer.running.aclose()
        except asyncio.CancelledError as error:
            if _is_cancelled():
                await self._end(error)
                raise
            # Not the reader was cancelled but something that it waited for: to the client that is a failure.
            abandoned = Internal("the request was abandoned by the router")
            await self._end(abandoned)
            raise abandoned from None
        except StopAsyncIteration:
            await self.aclose()
            raise
        except BaseException as error:
            await self._end(error)
            raise
        index, delta = self._ready.popleft()
        if delta.finish is not None:
            self._given = next(answer for answer in self._answers if answer.index == index)
        return index, delta

    @property
    def num_output_tokens(self) -> int:
        """The output tokens of all answers so far; of a beam search all that were computed, for any beam."""
        return sum(map(self._num_tokens, self._answers))

    def _num_tokens(self, answer: _Answer) -> int:
        search = answer.request.sampling.beams
        if search is None:
            return answer.num_tokens
        num_steps, limit = self._records[answer.index].num_output_tokens, answer.request.sampling.max_tokens
        return search.width * (num_steps if limit is None else min(num_steps, limit))  # a retry begins anew

    async def aclose(self) -> None:
        """Ends all requests in the whole cluster. Idempotent."""
        await self._end(None)

    async def _end(self, error: BaseException | None) -> None:
        """As `aclose`; what is not counted yet is counted as ended by the error."""
        self._passed_on()
        given = {answer.index: answer for answer in self._answers}
        for index in sorted(self._uncounted):
            answer = given.get(index)
            if answer is not None and answer.finish is not None:
                self._count(index, FINISHED, answer.finish.reason, self._num_tokens(answer))
            else:
                self._count(index, outcome_of(error), None, self._num_tokens(answer) if answer is not None else 0)
        self._open = []
        for answer in self._answers:
            await answer.running.aclose()

    def _take(self) -> list[_Answer]:
        """Converts what came for the open answers. Returns those that a stop string ended: what it cut off must not run
        on."""
        stopped: list[_Answer] = []
        for answer in tuple(self._open):
            try:
                delta = answer.running.take()
                if delta is None:
                    if answer.running.ended:
                        raise Internal(f"request {answer.request.request_id} ended without a finish reason")
                    continue
                outputs = answer.processor.outputs(delta)
            except Exception as error:
                self._error = error
                break
            for output in outputs:
                answer.num_tokens += len(output.token_ids)
                if output.finish is not None:
                    answer.finish = output.finish
                    self._open.remove(answer)
                    if delta.finish_reason is None:
                        stopped.append(answer)
                self._ready.append((answer.index, output))
        return stopped

    def _passed_on(self) -> None:
        """The reader has passed on what it got last."""
        answer, self._given = self._given, None
        if answer is not None and answer.finish is not None:
            self._count(answer.index, FINISHED, answer.finish.reason, self._num_tokens(answer))

    def _count(self, index: int, outcome: str, reason: FinishReason | None = None, num_tokens: int = 0) -> None:
        if index in self._uncounted:
            self._uncounted.remove(index)
            self._records[index].close(outcome, reason, num_tokens)
            self._ledger.ended(self._records[index])


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
