"""The edge on loopback: real HTTP and gRPC servers, a scripted core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio
import httpx
import openai
import pytest
import uvloop

from services.router.dispatch.request import FinishReason, Request
from services.router.edge.access import Access
from services.router.edge.catalog import Catalog
from services.router.edge.grpc.servicer import SERVICE_NAME, InferenceServicer, server_options
from services.router.edge.http.app import Kept, build_models_app
from services.router.edge.http.server.http_server import HttpServer
from services.router.edge.model_names import ModelNames
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.adapter_rights import AdapterRights
from shared.model.text.tokenizer import Tokenizer
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from shared.rpc.server import RpcServer, channel
from tests.demo import DEMO
from tests.unit.router.edge.fixed_view import FixedView
from tests.unit.router.edge.scripted_core import (
    MODEL,
    ScriptedCore,
    Step,
    byte_tokenizer,
    make_input_processor,
    text_steps,
)
from tests.waiting import DEADLINE_S


@dataclass
class Edge:
    """Running servers and clients of them."""

    core: ScriptedCore
    tokenizer: Tokenizer
    http: HttpServer
    client: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    channel: grpc.aio.Channel
    grpc_address: str  # host:port
    servicer: InferenceServicer
    view: FixedView
    kept: Kept

    async def stop(self) -> None:
        """As a router that ends."""
        await self.kept.close()
        await self.http.stop(0)

    def says(self, text: str, **options: object) -> None:
        """From now on every request is answered with `text`."""
        self.core.script = lambda request: text_steps(
            self.tokenizer,
            text,
            logprobs=request.sampling.logprobs,
            **options,  # type: ignore[arg-type]
        )

    def stops_with(self, text: str) -> None:
        """As `says`; the model ends its answer."""
        self.says(text, finish=FinishReason.STOP)

    @property
    def grpc(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        """A stub on the gRPC API."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def closed(self, index: int = 0) -> None:
        """Returns when the core's request `index` was freed; fails after the deadline."""
        await asyncio.wait_for(self.core.submitted.wait(), DEADLINE_S)
        await asyncio.wait_for(self.core.running[index].closed.wait(), DEADLINE_S)


StartEdge = Callable[..., Awaitable[Edge]]


def explain(request_id: str, tenant: str) -> inference_pb2.Explanation:
    """A router that remembers every request."""
    return inference_pb2.Explanation(request_id=request_id)


def info(request_id: str, tenant: str) -> inference_pb2.RequestInfo:
    """A router that has every request."""
    return inference_pb2.RequestInfo(request_id=request_id, state="decoding")


def cluster_status(window_s: float = 0.0) -> inference_pb2.ClusterStatus:
    return inference_pb2.ClusterStatus(router_name="router-0", model_name=MODEL, ready=True, num_finished=3)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the router runs on in earnest."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def edge_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo model's own tokenizer where it lies beside the code: merges, not single bytes."""
    if (DEMO / "tokenizer.json").is_file():
        return Tokenizer.load(DEMO)
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def start_edge(edge_tokenizer: Tokenizer) -> AsyncIterator[StartEdge]:
    """Starts an edge with the given settings; everything ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(script: Callable[[Request], Iterable[Step]] = lambda request: [], **settings: object) -> Edge:
            tokenizer = edge_tokenizer
            core = ScriptedCore(script)
            records = settings.pop("records", None)
            adapters = settings.pop("adapters", None)
            options = EdgeSettings(**settings)  # type: ignore[arg-type]
            input_processor = make_input_processor(core, tokenizer, options)
            input_processor.names = ModelNames(
                MODEL,
                adapters=adapters,
                rights=AdapterRights(options.tenants),  # type: ignore[arg-type]
            )
            view = FixedView(cluster_status())
            catalog = Catalog([input_processor])
            kept = Kept.of(options, catalog, records)  # type: ignore[arg-type]
            app = build_models_app(catalog, options, lambda: b"tandem_up 1\n", view, Access(), kept)
            http = HttpServer("127.0.0.1:0", app, options.limits, options.tls)
            await http.start()
            stack.push_async_callback(http.stop, 0)
            kept.start(app)
            stack.push_async_callback(kept.close)
            servicer = InferenceServicer(input_processor, catalog, options, cluster_status, explain, info)
            rpc = RpcServer(
                "127.0.0.1:0",
                servicer.register,
                (SERVICE_NAME,),
                options=server_options(options.limits),
                max_calls=options.limits.max_grpc_calls,
                credentials=options.tls.server_credentials(),
            )
            await rpc.start()
            stack.push_async_callback(rpc.stop, 0)
            url = f"http://{http.address}"
            # No TLS here: `verify=False` spares the clients the reading of certificates.
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, verify=False))
            sdk = await stack.enter_async_context(
                openai.AsyncOpenAI(
                    base_url=f"{url}/v1",
                    api_key=settings["api_keys"][0] if "api_keys" in settings else "none",
                    max_retries=0,
                    timeout=DEADLINE_S,
                    http_client=openai.DefaultAsyncHttpxClient(verify=False),
                )
            )
            grpc_channel = await stack.enter_async_context(channel(rpc.address))
            return Edge(core, tokenizer, http, client, sdk, grpc_channel, rpc.address, servicer, view, kept)

        yield start


@pytest.fixture
async def edge(start_edge: StartEdge) -> Edge:
    """An open edge with default settings."""
    return await start_edge()
