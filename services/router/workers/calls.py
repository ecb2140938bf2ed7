"""Commands to a worker that it answers once: each has a number, which the answer repeats."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.errors import TandemError
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import worker_pb2


class WorkerCalls:
    """Those of one worker that are not answered. Used from the event loop's thread alone."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    def begin(self) -> int:
        """The number of the next call."""
        self._num_calls += 1
        return self._num_calls

    async def answer_of(self, call: int) -> Any:
        """Waits for the answer to a call whose command was sent; raises what the worker answers, or what `fail` was
        given."""
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            self._answers.pop(call, None)

    def take(self, event: worker_pb2.Event) -> None:
        """An event that is the answer to a call."""
        match event.WhichOneof("event"):
            case "adapter_changed":
                adapter = event.adapter_changed
                error = from_proto(adapter.error) if adapter.HasField("error") else None
                self._settle(adapter.call, adapter.adapter, error)
            case "weights_changed":
                weights = event.weights_changed
                failed = from_proto(weights.error) if weights.HasField("error") else None
                self._settle(weights.call, weights, failed)
            case "session_closed":
                self._settle(event.session_closed.call, event.session_closed.num_blocks)

    def fail(self, error: TandemError) -> None:
        """Fails all calls that wait: the worker was lost."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _settle(self, call: int, result: object, error: TandemError | None = None) -> None:
        answer = self._answers.get(call)
        if answer is None or answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
