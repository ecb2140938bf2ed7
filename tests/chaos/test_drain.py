"""SIGTERM of any part under streams: every stream ends with all its tokens, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import signal

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.local.restarts import Restarted
from shared.rpc.server import channel
from tests.e2e.running import DEADLINE_S, Running, running

PROMPTS = [[20 + (i * (37 + 2 * k)) % 2000 for i in range(75)] for k in range(8)]
FIELDS = {"temperature": 0, "ignore_eos": True, "max_tokens": 240, "return_token_ids": True}


class Streams:
    """Answers under way, one list of tokens each."""

    def __init__(self, cluster: Running, prompts=PROMPTS, **fields) -> None:
        self._cluster = cluster
        self._fields = {**FIELDS, **fields}
        self._prompts = prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._tasks = [asyncio.create_task(self._read(number)) for number in range(len(prompts))]

    async def _read(self, number: int) -> None:
        body = {"prompt": self._prompts[number], "stream": True, **self._fields}
        async with self._cluster.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.tokens[number] += event["choices"][0].get("token_ids") or ()

    async def begun(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not all(self.tokens):
                await asyncio.sleep(0.005)

    async def ended(self, timeout_s: float = DEADLINE_S) -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)

    @property
    def num_open(self) -> int:
        return sum(not task.done() for task in self._tasks)


async def health(address: str) -> int:
    async with channel(address) as opened:
        answer = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        return answer.status


async def test_a_router_told_to_end_finishes_its_streams_and_refuses_others(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROUTER_DRAIN_TIMEOUT_S", f"{DEADLINE_S:g}")  # a busy machine's answers may take minutes
    fields = {**FIELDS, "max_tokens": 1000}  # the calls below come before their end
    async with running(tmp_path, num_kv_blocks=1100) as cluster:
        expected = await asyncio.gather(*(cluster.tokens(prompt, **fields) for prompt in PROMPTS))
        streams = Streams(cluster, **fields)
        await streams.begun()
        router = cluster.cluster.children["router"]
        router.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while (ready := await cluster.http.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.005)
        assert ready.json()["reason"] == "the router is draining"
        refused = await cluster.http.post("/v1/completions", json={"prompt": PROMPTS[0], **FIELDS})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cluster.generate(PROMPTS[0], max_tokens=4)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await health(cluster.cluster.grpc) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert router.returncode is None
        await streams.ended()
        assert streams.tokens == expected
        assert await router.wait(DEADLINE_S) == 0
        with pytest.raises(httpx.HTTPError):
            await cluster.http.get("/readyz")


@pytest.mark.slow
async def test_a_cluster_told_to_stop_finishes_its_streams_first(tmp_path):
    async with running(tmp_path, num_decode=2) as cluster:
        expected = await asyncio.gather(*(cluster.tokens(prompt, **FIELDS) for prompt in PROMPTS))
        streams = Streams(cluster)
        await streams.begun()
        await cluster.cluster.stop()
        await streams.ended()
        assert streams.tokens == expected


@pytest.mark.slow
async def test_parts_told_to_end_one_after_another_cost_no_stream_and_come_back(tmp_path):
    shape = {"num_decode": 2, "store_nodes": 2, "store_host_bytes": 1 << 22, "restart": True}
    async with running(tmp_path, **shape) as cluster:
        expected = await asyncio.gather(*(cluster.tokens(prompt, **FIELDS) for prompt in PROMPTS))
        for name in ("kvstore", "store-1", "decode-0"):
            streams = Streams(cluster)
            await streams.begun()
            ended = cluster.cluster.children[name]
            ended.send_signal(signal.SIGTERM)
            await streams.ended()
            assert streams.tokens == expected, name
            assert await ended.wait(DEADLINE_S) == 0, name
            while not isinstance(await cluster.cluster.next_change(), Restarted):
                pass
            await cluster.until(lambda status: status.ready and all(worker.connected for worker in status.workers))
            await cluster.idle()


NUM_LONG, NUM_LONG_TOKENS = 20, 1200
LONG_TIMEOUT_S = 240.0


@pytest.mark.slow
async def test_a_rolling_restart_of_the_prefill_pool_costs_no_long_stream(tmp_path):
    """One worker after another, each once the one before is back."""
    prompts = [[20 + (i * (37 + 2 * k)) % 2000 for i in range(75)] for k in range(NUM_LONG)]
    async with running(tmp_path, num_prefill=2, num_kv_blocks=2800, restart=True) as cluster:
        calm = Streams(cluster, prompts, max_tokens=NUM_LONG_TOKENS)
        await calm.ended(LONG_TIMEOUT_S)
        for name in ("prefill-0", "prefill-1"):
            streams = Streams(cluster, prompts, max_tokens=NUM_LONG_TOKENS)
            await streams.begun()
            ended = cluster.cluster.children[name]
            ended.send_signal(signal.SIGTERM)
            assert await ended.wait(DEADLINE_S) == 0
            assert streams.num_open > 0, "the answers were too short to last through a restart"
            while not isinstance(await cluster.cluster.next_change(), Restarted):
                pass
            await cluster.until(lambda status: all(worker.connected for worker in status.workers))
            await streams.ended(LONG_TIMEOUT_S)
            assert streams.tokens == calm.tokens
        await cluster.idle()
