"""A real cluster under test, and what a test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import httpx

from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import ClusterSpec
from shared.model.config.model_config import ModelConfig
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.patient import PATIENCE_S, patient

DEMO = Path(__file__).parents[2] / "models" / "demo"
DEADLINE_S = 300.0  # ten times what the slowest answer takes on a slow machine
BLOCK_SIZE = 16


def block_bytes(model: Path, element_bytes: int = 4) -> int:
    """Bytes of one KV block of the model."""
    in_fp32 = ModelConfig.load(model).block_layout(BLOCK_SIZE, "float32").block_bytes
    return in_fp32 * element_bytes // 4


class PatientCommands(TandemCommands):
    """The real services, of which a busy machine's pauses do not change what is fetched and what is computed."""

    def store_node(self, number, bind, redis_url):
        return [*super().store_node(number, bind, redis_url), "--redis-timeout-s", str(PATIENCE_S)]

    def worker(self, plan, kvstore):
        return patient(super().worker(plan, kvstore))


class Running:
    """Clients of one started cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.http = httpx.AsyncClient(base_url=f"http://{cluster.http}", timeout=DEADLINE_S)
        self.channel = grpc.aio.insecure_channel(cluster.grpc)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def close(self) -> None:
        await self.http.aclose()
        await self.channel.close()

    async def complete(self, prompt, **fields) -> dict:
        """POST /v1/completions; raises on an error status."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        response = await self.http.post("/v1/completions", json=body)
        response.raise_for_status()
        return response.json()

    async def tokens(self, prompt, **fields) -> list[int]:
        """Output token ids of a greedy completion."""
        return (await self.complete(prompt, **fields))["choices"][0]["token_ids"]

    async def generate(self, prompt: list[int], **sampling) -> list[inference_pb2.GenerateResponse]:
        """All messages of a greedy gRPC Generate."""
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(**{"temperature": 0.0, **sampling}),
        )
        return [message async for message in self.stub.Generate(request, timeout=DEADLINE_S)]

    async def status(self) -> inference_pb2.ClusterStatus:
        return await self.stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=DEADLINE_S)

    async def until(self, condition: Callable[[inference_pb2.ClusterStatus], bool]) -> inference_pb2.ClusterStatus:
        """Polls the status until the condition holds, within the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition(status := await self.status()):
                await asyncio.sleep(0.01)
        return status

    async def idle(self) -> inference_pb2.ClusterStatus:
        """Waits until no pool has a used block."""
        return await self.until(
            lambda status: all(
                w.load.num_free_blocks == w.load.num_total_blocks > 0 and not w.num_requests for w in status.workers
            )
        )


@contextlib.asynccontextmanager
async def running(tmp_path: Path, model: Path = DEMO, **spec) -> AsyncIterator[Running]:
    """Starts a cluster on free ports and stops it."""
    wanted = ClusterSpec(
        model=model, http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=tmp_path,
        **{"num_kv_blocks": 256, "dtype": "fp32", **spec},
    )  # fmt: skip
    async with LocalCluster(wanted, commands=PatientCommands(wanted)) as cluster:
        run = Running(cluster)
        try:
            await run.until(lambda status: status.ready and all(w.connected for w in status.workers))
            yield run
        finally:
            await run.close()


def loads(status: inference_pb2.ClusterStatus) -> dict[str, types_pb2.Load]:
    """Each worker's last report, by name."""
    return {worker.worker.name: worker.load for worker in status.workers}
