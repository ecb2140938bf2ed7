"""A worker without an engine: real gRPC sessions, scripted answers. Base class for the router's benchmarks and tests.

Events are written as bytes, so that a fleet's repeated messages are serialized once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from shared.kv.layout import LAYOUT_VERSION
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.rpc.protocol import PROTOCOL_VERSION, SESSION_SERVICE
from shared.rpc.server import RpcServer
from shared.seeds import SAMPLER_VERSION

Context = grpc.aio.ServicerContext[Any, Any]


class ScriptedWorker(ABC):
    """One worker of either role and its server. `send` puts an event on the newest session."""

    block_size = 16
    max_num_seqs = 8
    max_model_len = 8192

    def __init__(self, name: str, role: types_pb2.WorkerRole.ValueType) -> None:
        """The Welcome's fields (`fingerprint`, `incarnation`, `num_blocks`, …) may be changed before a session."""
        self.name = name
        self.role = role
        self.fingerprint = "scripted"
        self.incarnation = 1
        self.num_blocks = 100
        self.address = "127.0.0.1:0"
        """Its address once started; after a stop it starts again on the same port."""
        self._server: RpcServer | None = None
        self.context: Context | None = None
        """Context of the newest session."""
        self._writing = asyncio.Lock()  # a stream takes one message at a time

    @abstractmethod
    async def on_command(self, command: Any) -> None:
        """Handles one command of a session after its Hello: Submit, Reserve, Cancel, …; others wait meanwhile."""

    async def during_session(self) -> None:
        """Runs during a session, from its Welcome; cancelled at its end."""
        return

    async def start(self) -> str:
        """Serves; returns host:port."""
        self._server = RpcServer(self.address, self._register, ())
        await self._server.start()
        self.address = self._server.address
        return self.address

    async def stop(self) -> None:
        """Breaks all sessions, like a process that dies. Idempotent."""
        if self._server is not None:
            await self._server.stop(0.0)
            self._server = None

    async def send(self, **event: Any) -> None:
        """Sends one event, named by its field, such as `welcome=` or `load=`."""
        await self.send_bytes(worker_pb2.Events(events=[worker_pb2.Event(**event)]).SerializeToString())

    async def send_bytes(self, event: bytes) -> None:
        """Sends a serialized `Events`."""
        async with self._writing:
            assert self.context is not None, "no session yet"
            await self.context.write(event)

    def _register(self, server: grpc.aio.Server) -> None:
        session: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._session, worker_pb2.Commands.FromString, None
        )
        handlers = grpc.method_handlers_generic_handler(SESSION_SERVICE, {"Session": session})
        server.add_generic_rpc_handlers((handlers,))

    async def _session(self, envelopes: AsyncIterator[worker_pb2.Commands], context: Context) -> None:
        """See worker.proto."""
        (hello,) = (await anext(envelopes)).commands
        assert hello.hello.protocol_version == PROTOCOL_VERSION
        self.context = context
        await self.send(welcome=self._welcome())
        beside = asyncio.create_task(self.during_session())
        try:
            async for envelope in envelopes:
                for command in envelope.commands:
                    kind = command.WhichOneof("command")
                    assert kind is not None, "an empty command"
                    await self.on_command(getattr(command, kind))
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    def _welcome(self) -> types_pb2.Welcome:
        return types_pb2.Welcome(
            worker=types_pb2.WorkerId(name=self.name, incarnation=self.incarnation),
            roles=[self.role],
            model_fingerprint=self.fingerprint,
            layout=types_pb2.BlockLayout(
                num_layers=1,
                num_kv_heads=1,
                head_dim=8,
                block_size=self.block_size,
                dtype="float32",
                layout_version=LAYOUT_VERSION,
            ),
            transfer_address=self.name.encode(),
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            protocol_version=PROTOCOL_VERSION,
            sampler_version=SAMPLER_VERSION,
        )
