"""Prompts through a real Envoy, which asks a router's picker where they go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import ClusterSpec
from tests.demo import DEMO
from tests.integration.router_picker.envoy import ENVOY, envoy
from tests.integration.router_picker.routers import free_neighbours, free_ports, knows_both
from tests.waiting import DEADLINE_S, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.skipif(ENVOY is None, reason="no Envoy: `make k8s-programs` brings one, or set TANDEM_ENVOY"),
]
MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED")
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me about Noah."}],
    "temperature": 0,
    "max_tokens": 12,
}


class WithPickers(TandemCommands):
    """Each router has a picker that knows all of them."""

    def __init__(self, spec: ClusterSpec, pickers: Sequence[str], https: Sequence[str]) -> None:
        super().__init__(spec)
        self._pickers, self._https = pickers, https

    def router(self, workers, kvstore, stores="", number=0):
        flags = {"picker.bind": self._pickers[number], "picker.endpoints": ",".join(self._https)}
        return [
            *super().router(workers, kvstore, stores, number),
            *(part for name, value in flags.items() for part in (f"--{name}", value)),
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[LocalCluster, str, Path]]:
    """Two routers, and the address of the first one's picker."""
    folder = tmp_path_factory.mktemp("picker")
    first = free_neighbours()
    pickers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    https = [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    spec = ClusterSpec(
        model=DEMO,
        num_prefill=0,
        mode="collocated",
        num_routers=2,
        http=https[0],
        grpc="127.0.0.1:0",
        num_kv_blocks=256,
        dtype="fp32",
        state_dir=folder,
    )
    async with LocalCluster(spec, commands=WithPickers(spec, pickers, https)) as running:
        async with httpx.AsyncClient() as client:
            for http in https:
                await _ready(client, http)
        async with grpc.aio.insecure_channel(pickers[0]) as channel:
            await knows_both(channel, https)
        yield running, pickers[0], folder


async def _ready(client: httpx.AsyncClient, http: str) -> None:
    async def is_ready() -> bool:
        return (await client.get(f"http://{http}/readyz")).status_code == 200

    await until(is_ready)


@pytest.mark.parametrize("mode", MODES)
async def test_prompts_are_answered_through_envoy(cluster, mode: str) -> None:
    running, picker, folder = cluster
    https = [router.http for router in running.routers]
    async with envoy(folder, free_ports(1)[0], picker, https, mode) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 200, response.text
        whole = response.json()["choices"][0]["message"]["content"]
        streamed = ""
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        streamed += choice["delta"].get("content") or ""
        assert streamed == whole != ""
        refused = await client.post("/v1/chat/completions", content=b'{"messages": [')
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_sessions_reach_their_router_and_a_client_cannot_name_one(cluster) -> None:
    running, picker, folder = cluster
    https = [router.http for router in running.routers]
    async with envoy(folder, free_ports(1)[0], picker, https, MODES[0]) as client:
        names = {}
        for number in range(12):
            headers = {"x-session-id": f"talk-{number}"}
            told = [(await client.get("/status", headers=headers)).json()["router_name"] for _ in range(3)]
            assert len(set(told)) == 1
            names[number] = told[0]
        assert set(names.values()) == {"router-0", "router-1"}
        number, other = next((n, https[name == "router-0"]) for n, name in names.items())
        forged = {"x-session-id": f"talk-{number}", "x-gateway-destination-endpoint": other}
        assert (await client.get("/status", headers=forged)).json()["router_name"] == names[number]


async def test_what_the_picker_refuses_envoy_answers_itself(cluster) -> None:
    running, picker, folder = cluster
    https = [router.http for router in running.routers]
    async with envoy(folder, free_ports(1)[0], picker, https, MODES[0]) as client:
        async with asyncio.timeout(DEADLINE_S):  # by hand: a client that still sends its body may miss the answer
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: 9437184\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            writer.close()
        running.children["decode-0"].kill()
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient() as direct:
            for http in https:  # a prompt that came before would wait for the worker's return
                while (await direct.get(f"http://{http}/readyz")).status_code == 200:
                    await asyncio.sleep(0.02)
            while True:  # a router refuses too, until the picker has seen that it is not ready
                response = await client.post("/v1/completions", json={"prompt": "x"})
                if response.status_code == 503 and "router" in response.json()["error"]["message"]:
                    break
                await asyncio.sleep(0.02)
        assert response.json()["error"]["message"] == "no router is ready"
        assert response.headers["content-type"] == "application/json"
