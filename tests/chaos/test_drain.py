"""SIGTERM of any part under streams: every stream ends with all its tokens, and nothing leaks."""

from __future__ import annotations

import signal

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.rpc.server import channel
from tests.e2e.running import running
from tests.e2e.streams import FIELDS, Streams, prompt, undisturbed
from tests.waiting import DEADLINE_S, until

NUM_STREAMS = 8
NUM_TOKENS = 240
PROMPTS = [prompt(number) for number in range(NUM_STREAMS)]
SHORT = {**FIELDS, "max_tokens": NUM_TOKENS}


async def health(address: str) -> int:
    async with channel(address) as opened:
        answer = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        return answer.status


async def test_a_router_told_to_end_finishes_its_streams_and_refuses_others(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROUTER_DRAIN_TIMEOUT_S", f"{DEADLINE_S:g}")  # a busy machine's answers may take minutes
    async with running(tmp_path) as cluster:
        expected = await undisturbed(cluster, 800, num=2)  # the calls below come before their end
        streams = Streams(cluster, PROMPTS[:2], **{**FIELDS, "max_tokens": 800})
        await streams.begun()
        router = cluster.cluster.children["router"]
        router.send_signal(signal.SIGTERM)

        async def unready() -> httpx.Response | None:
            page = await cluster.http.get("/readyz")
            return page if page.status_code != 200 else None

        assert (await until(unready)).json()["reason"] == "the router is draining"
        refused = await cluster.http.post("/v1/completions", json={"prompt": PROMPTS[0], **SHORT})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cluster.generate(PROMPTS[0], max_tokens=4)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await health(cluster.cluster.grpc) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert router.returncode is None
        assert await streams.ended() == expected
        assert await router.wait(DEADLINE_S) == 0
        with pytest.raises(httpx.HTTPError):
            await cluster.http.get("/readyz")


@pytest.mark.slow
async def test_a_rolling_restart_of_the_prefill_pool_costs_no_long_stream(tmp_path):
    """One worker after another, each once the one before is back."""
    long = {**FIELDS, "max_tokens": 1200}
    prompts = [prompt(number) for number in range(20)]
    async with running(tmp_path, num_prefill=2, num_kv_blocks=2800, restart=True) as cluster:
        expected = await undisturbed(cluster, 1200, len(prompts))
        for name in ("prefill-0", "prefill-1"):
            streams = Streams(cluster, prompts, **long)
            await streams.begun()
            ended = cluster.cluster.children[name]
            ended.send_signal(signal.SIGTERM)
            assert await ended.wait(DEADLINE_S) == 0
            assert streams.num_open > 0, "the answers were too short to last through a restart"
            assert await cluster.restarted(name) == "exit status 0"
            await cluster.until(lambda status: all(worker.connected for worker in status.workers))
            assert await streams.ended() == expected
        await cluster.idle()
