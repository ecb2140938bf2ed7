"""What operators and clients ask of one worker beside its requests: drains, adapters, weights, sessions."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from shared.errors import TandemError
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2


class SendCommand(Protocol):
    """The function by which a link sends a command."""

    def __call__(self, **command: Any) -> None:
        """Queues a command, named by its field; raises WorkerLost while the worker is not connected."""
        ...


class WorkerCalls:
    """A command that has an answer carries the number of its call, which the answer repeats.

    Every method raises WorkerLost where the worker is not connected, or is lost before it answers. Used from the event
    loop's thread alone.
    """

    def __init__(self, send: SendCommand) -> None:
        self._send = send
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by call, of those that wait
        self._num_calls = 0

    def drain(self, *, undo: bool = False) -> None:
        """Asks the worker to take no new requests from any router, or to take them again; its next report shows
        that."""
        if undo:
            self._send(undrain=types_pb2.Undrain())
        else:
            self._send(drain=types_pb2.Drain())

    async def load_adapter(self, name: str, *, folder: str = "", digest: str = "") -> types_pb2.Adapter:
        """Has the worker read an adapter from a folder, or give the one of a digest its name; raises what it
        answers."""
        call = self._next_call()
        self._send(load_adapter=worker_pb2.LoadAdapter(call=call, name=name, folder=folder, digest=digest))
        adapter: types_pb2.Adapter = await self._answer_of(call)
        return adapter

    async def unload_adapter(self, *, name: str = "", digest: str = "") -> None:
        """Has the worker forget an adapter's name, or what it read and gave no name; raises what it answers."""
        call = self._next_call()
        self._send(unload_adapter=worker_pb2.UnloadAdapter(call=call, name=name, digest=digest))
        await self._answer_of(call)

    async def close_session(self, tenant: str, session: str) -> int:
        """The worker retains nothing for a tenant's session any more; returns the number of blocks that this frees."""
        call = self._next_call()
        self._send(close_session=worker_pb2.CloseSession(call=call, tenant=tenant, session=session))
        num_blocks: int = await self._answer_of(call)
        return num_blocks

    def expect_session(self, tenant: str, session: str, next_turn_s: float) -> None:
        """A tenant's session may come back to the worker that many seconds from now."""
        self._send(expect_session=worker_pb2.ExpectSession(tenant=tenant, session=session, next_turn_s=next_turn_s))

    async def change_weights(
        self, step: worker_pb2.WeightStep.ValueType, folder: str = "", timeout_s: float = 0.0
    ) -> worker_pb2.WeightsChanged:
        """Has the worker take one step of a change; raises what it answers."""
        call = self._next_call()
        self._send(change_weights=worker_pb2.ChangeWeights(call=call, step=step, folder=folder, timeout_s=timeout_s))
        changed: worker_pb2.WeightsChanged = await self._answer_of(call)
        return changed

    def take(self, event: worker_pb2.Event) -> None:
        """Takes an event that is the answer to a call."""
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

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls

    async def _answer_of(self, call: int) -> Any:
        """Waits for the answer to a call whose command was sent; raises what the worker answers, or what `fail` was
        given."""
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            self._answers.pop(call, None)

    def _settle(self, call: int, result: object, error: TandemError | None = None) -> None:
        answer = self._answers.get(call)
        if answer is None or answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
