"""A worker without an engine: real gRPC sessions, answers written by the test."""

from __future__ import annotations

import asyncio

from loadtest.bench.router import scripted_worker
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.waiting import DEADLINE_S


class ScriptedWorker(scripted_worker.ScriptedWorker):
    """Records commands; what it answers is the test's to say."""

    block_size = 4
    max_model_len = 1000

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType, *, fingerprint: str = "model") -> None:
        super().__init__(name, role)
        self.fingerprint = fingerprint
        self.commands: asyncio.Queue = asyncio.Queue()

    @property
    def context(self):
        """The newest session, to which events go."""
        return self._context

    @context.setter
    def context(self, session) -> None:
        self._context = session

    async def on_command(self, command) -> None:
        self.commands.put_nowait(command)

    async def expect(self, kind: type):
        """The next command, which must be of that kind."""
        async with asyncio.timeout(DEADLINE_S):
            command = await self.commands.get()
        assert isinstance(command, kind), f"{self.name} got {type(command).__name__}, not {kind.__name__}"
        return command

    # --- what a worker of the role says

    async def reserved(self, request_id: str, ticket: int = 7, needed=(0, 1), **more) -> None:
        reserved = worker_pb2.Reserved(request_id=request_id, ticket=ticket, needed_blocks=needed, **more)
        await self.send(reserved=reserved)

    async def first_token(self, request_id: str, token: int, finish=0, **more) -> None:
        tokens = types_pb2.SequenceTokens(request_id=request_id, token_ids=[token], finish_reason=finish, **more)
        await self.send(first_token=worker_pb2.FirstToken(tokens=tokens))

    async def step(self, request_id: str, *tokens: int, finish=0, **more) -> None:
        sequence = types_pb2.SequenceTokens(request_id=request_id, token_ids=tokens, finish_reason=finish, **more)
        await self.send(step=worker_pb2.Step(sequences=[sequence]))

    async def failed(self, request_id: str, error: types_pb2.Error) -> None:
        await self.send(failed=types_pb2.Failed(request_id=request_id, error=error))

    async def report(self, **load) -> None:
        await self.send(load=types_pb2.Load(**load))
