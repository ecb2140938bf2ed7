"""The output of one client call: all its answers, as they come, from the core to the writer of the reply."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from services.router.dispatch.record import FINISHED
from services.router.dispatch.request import Core, FinishReason, Request, RunningRequest
from services.router.edge.request_ledger import Ledger, Uncounted, outcome_of
from services.router.edge.text.output_processor import OutputDelta, OutputFinish, OutputProcessor, output_processor
from shared.errors import Internal
from shared.model.text.tokenizer import Tokenizer


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
        self.num_output_tokens = 0  # of all answers so far
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
                await self._wait()
                await self._take()
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
                self._count(index, FINISHED, answer.finish.reason, answer.num_tokens)
            else:
                self._count(index, outcome_of(error), None, answer.num_tokens if answer is not None else 0)
        self._open = []
        for answer in self._answers:
            await answer.running.aclose()

    async def _wait(self) -> None:
        """Until some open answer has something to take."""
        reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for answer in self._open:
            answer.running.notify(reader)
        await reader

    async def _take(self) -> None:
        """Converts what came for the open answers."""
        for answer in tuple(self._open):
            try:
                delta = answer.running.take()
                if delta is None:
                    if answer.running.ended:
                        raise Internal(f"request {answer.request.request_id} ended without a finish reason")
                    continue
                output = answer.processor.process(delta)
            except Exception as error:
                self._error = error
                return
            self.num_output_tokens += len(output.token_ids)
            answer.num_tokens += len(output.token_ids)
            if output.finish is not None:
                answer.finish = output.finish
                self._open.remove(answer)
                if delta.finish_reason is None:  # a stop string: what it cut off must not run on
                    await answer.running.aclose()
            self._ready.append((answer.index, output))

    def _passed_on(self) -> None:
        """The reader has passed on what it got last."""
        answer, self._given = self._given, None
        if answer is not None and answer.finish is not None:
            self._count(answer.index, FINISHED, answer.finish.reason, answer.num_tokens)

    def _count(self, index: int, outcome: str, reason: FinishReason | None = None, num_tokens: int = 0) -> None:
        if index in self._uncounted:
            self._uncounted.remove(index)
            self._records[index].close(outcome, reason, num_tokens)
            self._ledger.ended(self._records[index])


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
