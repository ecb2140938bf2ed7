"""The minimum that any gRPC router has to do: the floor with which `measure` compares Tandem's router.

`python -m loadtest.bench.router.relay --prefill name=host:port,… --decode … --grpc host:port …` uses the same workers,
clients and messages. It places by round robin and has no validation, queue, limits, metrics, retries or second API. Its
cost is that of gRPC and Python for the messages.
"""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Annotated, Any

import grpc
import grpc.aio

from loadtest.rig.command_line import Option, run
from shared.process import run_process
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.server import RpcServer, channel
from shared.seeds import SAMPLER_VERSION

SERVICE = "tandem.v1.InferenceService"


def command(**body: Any) -> worker_pb2.Commands:
    """An envelope of one command, named by its field."""
    return worker_pb2.Commands(commands=[worker_pb2.Command(**body)])


class Relayed:
    """One running request."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        self.name = f"{request.request_id}#1"
        self.prefill: asyncio.Queue[Any] | None = None
        self.transfer_address = b""
        self.tokens: asyncio.Queue[types_pb2.SequenceTokens] = asyncio.Queue()

    def reserve(self) -> worker_pb2.Commands:
        """The command for the decode worker."""
        request = self.request
        return command(
            reserve=worker_pb2.Reserve(
                request_id=self.name,
                token_ids=request.tokens.ids,
                num_prompt_tokens=len(request.tokens.ids),
                sampling=request.sampling,
            )
        )

    def submit(self, reserved: worker_pb2.Reserved) -> worker_pb2.Commands:
        """The command for the prefill worker."""
        request = self.request
        return command(
            submit=worker_pb2.Submit(
                request_id=self.name,
                token_ids=request.tokens.ids,
                num_prompt_tokens=len(request.tokens.ids),
                sampling=request.sampling,
                ticket=reserved.ticket,
                transfer_address=self.transfer_address,
                needed_blocks=reserved.needed_blocks,
            )
        )


class Relay:
    """Sessions to all workers, and the clients' service."""

    def __init__(self) -> None:
        self._running: dict[str, Relayed] = {}
        self._prefills: list[asyncio.Queue[Any]] = []
        self._decodes: list[tuple[asyncio.Queue[Any], bytes]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, prefills: list[str], decodes: list[str]) -> None:
        """Opens the sessions; returns when all workers have sent their Welcome."""
        hello = types_pb2.Hello(router_name="relay", protocol_version=PROTOCOL_VERSION, sampler_version=SAMPLER_VERSION)
        for address in prefills:
            call = worker_pb2_grpc.WorkerServiceStub(channel(address)).Session()
            await call.write(command(hello=hello))
            await call.read()
            self._prefills.append(self._session(call))
        for address in decodes:
            stream: Any = worker_pb2_grpc.WorkerServiceStub(channel(address)).Session()
            await stream.write(command(hello=hello))
            welcome = (await stream.read()).events[0].welcome
            self._decodes.append((self._session(stream), welcome.transfer_address))
        self._next_prefill, self._next_decode = cycle(self._prefills), cycle(self._decodes)

    def register(self, server: grpc.aio.Server) -> None:
        """The `register` of `RpcServer`."""
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self._generate, inference_pb2.GenerateRequest.FromString, inference_pb2.GenerateResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Reserves, submits, relays the tokens."""
        relayed = Relayed(request)
        relayed.prefill = next(self._next_prefill)
        decode, relayed.transfer_address = next(self._next_decode)
        self._running[relayed.name] = relayed
        decode.put_nowait(relayed.reserve())
        try:
            while True:
                tokens = await relayed.tokens.get()
                response = inference_pb2.GenerateResponse(request_id=request.request_id, token_ids=tokens.token_ids)
                response.finish_reason = tokens.finish_reason
                await context.write(response)
                if tokens.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
                    return
        finally:
            del self._running[relayed.name]

    def _session(self, call: Any) -> asyncio.Queue[Any]:
        commands: asyncio.Queue[Any] = asyncio.Queue()

        async def write() -> None:
            while True:
                await call.write(await commands.get())

        async def read() -> None:
            while (envelope := await call.read()) is not grpc.aio.EOF:
                for event in envelope.events:
                    self._on_event(event)

        self._tasks += [asyncio.create_task(write()), asyncio.create_task(read())]
        return commands

    def _on_event(self, event: worker_pb2.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "first_token":
            self._on_tokens(event.first_token.tokens)
        elif kind == "step":
            for tokens in event.step.sequences:
                self._on_tokens(tokens)
        elif kind == "reserved" and (relayed := self._running.get(event.reserved.request_id)) is not None:
            assert relayed.prefill is not None
            relayed.prefill.put_nowait(relayed.submit(event.reserved))

    def _on_tokens(self, tokens: types_pb2.SequenceTokens) -> None:
        relayed = self._running.get(tokens.request_id)
        if relayed is not None:
            relayed.tokens.put_nowait(tokens)


class RelayService:
    """The relay and its server; see `shared.process.Service`."""

    address = ""

    def __init__(self, server: RpcServer) -> None:
        self._server = server

    @staticmethod
    async def start(prefills: list[str], decodes: list[str], bind: str) -> RelayService:
        """Serves clients once all workers' sessions are open."""
        relay = Relay()
        await relay.connect(prefills, decodes)
        service = RelayService(RpcServer(bind, relay.register, (SERVICE,)))
        await service._server.start()
        return service

    @property
    def endpoints(self) -> dict[str, str]:
        """Addresses by API, as a router names its own."""
        return {"grpc": self._server.address}

    async def close(self) -> None:
        """Breaks all streams."""
        await self._server.stop(0.0)


def main(
    prefill: Annotated[str, Option("name=host:port, comma-separated")],
    decode: Annotated[str, Option("likewise")],
    grpc: Annotated[str, Option("host:port to serve on")],
    http: Annotated[str, Option("the router's; not used")] = "",
    model: Annotated[str, Option("the router's; not used")] = "",
    queue_limit: Annotated[int, Option("the router's; not used")] = 0,
) -> int:
    """See the module's docstring."""
    del http, model, queue_limit
    prefills, decodes = ([item.partition("=")[2] for item in workers.split(",")] for workers in (prefill, decode))
    return run_process("relay", lambda: RelayService.start(prefills, decodes, grpc))


if __name__ == "__main__":
    run(main)
