"""A worker without an engine: real gRPC sessions, answers written by the test."""

from __future__ import annotations

import asyncio

import grpc.aio

from shared.kv.layout import LAYOUT_VERSION
from shared.rpc.pb.tandem.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import RpcServer

DEADLINE_S = 10.0


class ScriptedWorker(prefill_pb2_grpc.PrefillServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """Records commands; `send` puts an event on the newest session."""

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType, *, fingerprint: str = "model") -> None:
        self.name = name
        self.prefill = role == types_pb2.WORKER_ROLE_PREFILL
        self.role = role
        self.fingerprint = fingerprint
        self.incarnation = 1
        self.num_blocks = 100
        self.commands: asyncio.Queue = asyncio.Queue()
        self.context = None
        self._writing = asyncio.Lock()
        self.server: RpcServer | None = None
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        def register(server: grpc.aio.Server) -> None:
            if self.prefill:
                prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)
            else:
                decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

        self.server = RpcServer(self.address, register, ())
        await self.server.start()
        self.address = self.server.address

    async def stop(self) -> None:
        """As a process that dies: the stream breaks."""
        if self.server is not None:
            await self.server.stop(0.0)
            self.server = None

    async def Session(self, request_iterator, context):  # noqa: N802
        hello = await context.read()
        assert hello.hello.protocol_version == PROTOCOL_VERSION
        self.context = context
        await self.send(
            welcome=types_pb2.Welcome(
                worker=types_pb2.WorkerId(name=self.name, incarnation=self.incarnation),
                role=self.role,
                model_fingerprint=self.fingerprint,
                layout=types_pb2.BlockLayout(
                    num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32",
                    layout_version=LAYOUT_VERSION,
                ),
                transfer_address=self.name.encode(),
                num_blocks=self.num_blocks,
                max_model_len=1000,
                max_num_seqs=8,
                protocol_version=PROTOCOL_VERSION,
            )
        )  # fmt: skip
        while (command := await context.read()) is not grpc.aio.EOF:
            self.commands.put_nowait(getattr(command, command.WhichOneof("command")))

    async def send(self, **event) -> None:
        kind = prefill_pb2.PrefillEvent if self.prefill else decode_pb2.DecodeEvent
        async with self._writing:  # one write at a time: the Welcome may still be on its way
            await self.context.write(kind(**event))

    async def expect(self, kind: type):
        """The next command, which must be of that kind."""
        async with asyncio.timeout(DEADLINE_S):
            command = await self.commands.get()
        assert isinstance(command, kind), f"{self.name} got {type(command).__name__}, not {kind.__name__}"
        return command

    # --- what a worker of the role says

    async def reserved(self, request_id: str, ticket: int = 7, needed=(0, 1)) -> None:
        await self.send(reserved=decode_pb2.Reserved(request_id=request_id, ticket=ticket, needed_blocks=needed))

    async def first_token(self, request_id: str, token: int, finish=0, **more) -> None:
        tokens = types_pb2.SequenceTokens(request_id=request_id, token_ids=[token], finish_reason=finish, **more)
        await self.send(first_token=prefill_pb2.FirstToken(tokens=tokens))

    async def step(self, request_id: str, *tokens: int, finish=0, **more) -> None:
        sequence = types_pb2.SequenceTokens(request_id=request_id, token_ids=tokens, finish_reason=finish, **more)
        await self.send(step=decode_pb2.Step(sequences=[sequence]))

    async def failed(self, request_id: str, error: types_pb2.Error) -> None:
        await self.send(failed=types_pb2.Failed(request_id=request_id, error=error))

    async def report(self, **load) -> None:
        await self.send(load=types_pb2.Load(**load))
