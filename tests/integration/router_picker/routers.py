"""Router processes with pickers over one scripted worker, and ext-proc streams to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
import httpx
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from shared.process_events import Ready, parse_event
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.demo import DEMO
from tests.integration.router.scripted_worker import ScriptedWorker
from tests.waiting import DEADLINE_S, until

DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
WORKER_BLOCKS = 100


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def free_neighbours() -> int:
    """A port such that nobody listens on it, nor on the next one."""
    while True:
        [first] = free_ports(1)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first


class RouterProcess:
    """`python -m services.router` with a picker."""

    def __init__(self, name: str, http: str, worker: str, endpoints: Sequence[str]) -> None:
        self.name, self.http = name, http
        self._flags = {
            "name": name,
            "http": http,
            "grpc": "127.0.0.1:0",
            "model": DEMO,
            "mode": "collocated",
            "decode": f"d0={worker}",
            "queue-limit": 1,
            "suspect-after-s": 60,
            "give-up-after-s": 600,
            "drain-timeout-s": 0,
            "picker.bind": "127.0.0.1:0",
            "picker.endpoints": ",".join(endpoints),
        }

    async def start(self) -> None:
        """Returns when it is ready to serve prompts."""
        flags = [part for name, value in self._flags.items() for part in (f"--{name}", str(value))]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.router", *flags, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(event := parse_event(await self.process.stdout.readline()), Ready):
                assert event is None or self.process.returncode is None, event
        self.channel = grpc.aio.insecure_channel(event.endpoints["picker"])
        self.client = httpx.AsyncClient(base_url=f"http://{self.http}", timeout=DEADLINE_S)
        await self.until(lambda page: page["ready"])

    async def until(self, condition) -> None:
        """Waits until the page /readyz is so."""

        async def fulfilled() -> bool:
            return condition((await self.client.get("/readyz")).json())

        await until(fulfilled)

    async def stop(self) -> None:
        await self.channel.close()
        await self.client.aclose()
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await self.process.communicate()

    def exchange(self) -> Exchange:
        return Exchange(self.channel)


class Exchange:
    """One ext-proc stream, as a proxy holds it for one request."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process()
        self._first = True

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()

    async def ask(self, mode: int | None = None, **message: Any) -> ext_proc.ProcessingResponse:
        """Sends one message, returns its answer; `mode` goes with the first one."""
        request = ext_proc.ProcessingRequest(**message)
        if mode is not None:
            request.protocol_config.request_body_mode = request.protocol_config.response_body_mode = mode
        async with asyncio.timeout(DEADLINE_S):
            await self._call.write(request)
            return await self._call.read()

    async def headers(
        self, mode: int | None = DUPLEX, subset: object = None, **headers: str
    ) -> ext_proc.ProcessingResponse:
        """Request headers, `x_session_id` for x-session-id."""
        entries = [HeaderValue(key=k.replace("_", "-"), raw_value=v.encode()) for k, v in headers.items()]
        message: dict[str, Any] = {"request_headers": ext_proc.HttpHeaders(headers=HeaderMap(headers=entries))}
        request = ext_proc.ProcessingRequest(**message)
        if subset is not None:
            hint = {"x-gateway-destination-endpoint-subset": subset}
            request.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
        return await self.ask(mode, metadata_context=request.metadata_context, **message)


def picked(response: ext_proc.ProcessingResponse) -> list[str]:
    """The endpoints, which header and metadata must name alike."""
    assert response.WhichOneof("response") == "request_headers", response
    [header] = response.request_headers.response.header_mutation.set_headers
    named = response.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert header.header.key == "x-gateway-destination-endpoint"
    assert header.header.raw_value.decode() == named
    return named.split(",")


@contextlib.asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[RouterProcess, RouterProcess, ScriptedWorker]]:
    """Both ready, each of whose pickers knows both."""
    worker = ScriptedWorker("d0", types_pb2.WORKER_ROLE_DECODE)
    worker.num_blocks = WORKER_BLOCKS
    await worker.start()
    https = [f"127.0.0.1:{port}" for port in free_ports(2)]
    routers = [RouterProcess(f"router-{number}", http, worker.address, https) for number, http in enumerate(https)]
    try:
        for router in routers:  # one after the other: the worker welcomes its newest session
            await router.start()
        for router in routers:
            await knows_both(router.channel, https)
        yield routers[0], routers[1], worker
    finally:
        for router in routers:
            await router.stop()
        await worker.stop()


async def knows_both(picker: grpc.aio.Channel, https: Sequence[str]) -> None:
    """Waits until the picker has found both routers ready: it looks for itself, and sessions move when one joins."""
    await answer_until(
        lambda: Exchange(picker),
        lambda answer: not answer.HasField("immediate_response") and sorted(picked(answer)) == sorted(https),
    )


async def answer_until(
    exchange: Callable[[], Exchange], condition: Callable[[ext_proc.ProcessingResponse], bool], **headers: Any
) -> ext_proc.ProcessingResponse:
    """Asks a picker again until the condition holds of its answer to these headers."""

    async def fitting() -> ext_proc.ProcessingResponse | None:
        async with exchange() as asked:
            answer = await asked.headers(**headers)
        return answer if condition(answer) else None

    return await until(fitting)
