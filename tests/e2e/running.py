"""A real cluster under test, and what a test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from unittest.mock import patch

import grpc.aio
import httpx
import psutil

from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import ClusterSpec
from services.local.supervisor import Died, Restarted
from shared.model.families.registry import load_config
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tandem_cli.main import main
from tests.e2e.patient import PATIENCE_S, patient
from tests.fork_server import forked_services
from tests.waiting import DEADLINE_S, until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
BLOCK_SIZE = 16


def block_bytes(model: Path, element_bytes: int = 4) -> int:
    """Bytes of one KV block of the model."""
    in_fp32 = load_config(model).block_layout(BLOCK_SIZE, "float32").block_bytes
    return in_fp32 * element_bytes // 4


class PatientCommands(TandemCommands):
    """The real services, of which a busy machine's pauses do not change what is fetched and what is computed, nor
    which requests wait for a worker that restarts."""

    def store_node(self, number, bind, redis_url):
        return [*super().store_node(number, bind, redis_url), "--redis-timeout-s", str(PATIENCE_S)]

    def worker(self, plan, kvstore):
        return patient(super().worker(plan, kvstore))

    def router(self, *arguments, **named):
        return [*super().router(*arguments, **named), "--queue-timeout-s", str(DEADLINE_S)]


class Running:
    """Clients of one started cluster."""

    def __init__(self, cluster: LocalCluster, commands: TandemCommands, api_key: str = "") -> None:
        """`commands` are those of the cluster's parts; `api_key` goes with every call where it is given."""
        self.cluster = cluster
        self.commands = commands
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.http = httpx.AsyncClient(
            base_url=f"http://{cluster.http}", timeout=DEADLINE_S, headers=dict(self._metadata)
        )
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

    async def events(
        self, body: Mapping[str, object], path: str = "/v1/completions", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[dict]:
        """The events of a streamed answer, the one of an error too."""
        streaming = self.http.stream("POST", path, json={**body, "stream": True}, headers=headers)
        async with streaming as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def streamed(self, prompt, **fields) -> AsyncIterator[list[int]]:
        """Token ids of a streamed answer, greedy unless the fields say otherwise, event by event."""
        async for event in self.events({"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}):
            assert "error" not in event, event
            for choice in event["choices"]:
                yield choice.get("token_ids") or []

    async def generate(self, prompt: list[int], **sampling) -> list[inference_pb2.GenerateResponse]:
        """All messages of a greedy gRPC Generate."""
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(**{"temperature": 0.0, **sampling}),
        )
        return [message async for message in self.stub.Generate(request, timeout=DEADLINE_S)]

    async def status(self, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        """With the requests of the last `window_s` seconds; 0: of the default window."""
        request = inference_pb2.GetStatusRequest(window_s=window_s)
        return await self.stub.GetStatus(request, timeout=DEADLINE_S, metadata=self._metadata)

    async def until(self, condition: Callable[[inference_pb2.ClusterStatus], bool]) -> inference_pb2.ClusterStatus:
        """The first status of which the condition holds."""

        async def fitting() -> inference_pb2.ClusterStatus | None:
            status = await self.status()
            return status if condition(status) else None

        return await until(fitting)

    async def idle(self) -> inference_pb2.ClusterStatus:
        """Waits until no pool has a used block."""
        return await self.until(
            lambda status: all(
                w.load.num_free_blocks == w.load.num_total_blocks > 0 and not w.num_requests for w in status.workers
            )
        )

    async def healthy(self) -> None:
        """Waits until the cluster is ready and nothing is degraded, also where the router is not back yet."""

        async def is_healthy() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                page = (await self.http.get("/readyz")).json()
                return page["ready"] and not page["degraded"]
            return False

        await until(is_healthy)

    async def busy(self, kind: str = "decode") -> str:
        """Waits until workers of the kind have requests; the name of the one that has most."""

        def pool(status: inference_pb2.ClusterStatus) -> list[inference_pb2.WorkerStatus]:
            return [w for w in status.workers if w.num_requests and w.worker.name.startswith(kind)]

        return max(pool(await self.until(pool)), key=lambda w: w.num_requests).worker.name

    @property
    def kvstore_address(self) -> str:
        """From the router's own command line."""
        arguments = self.cluster.children["router"].command
        return arguments[arguments.index("--kvstore") + 1]

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """To the process of that name."""
        os.kill(self.pid(name), number)

    def pid(self, name: str) -> int:
        """Of the process of that name; `valkey` is the index's."""
        pid = self.cluster.index_pid if name == "valkey" else self.cluster.children[name].pid
        assert pid is not None
        return pid

    async def arm(self, *names: str) -> None:
        """Arms the failpoints of these processes; returns when they are."""

        def num_armed() -> list[int]:
            return [self.cluster.children[name].log_path.read_text().count("armed:") for name in names]

        before = num_armed()
        for name in names:
            self.signal(name, signal.SIGUSR1)
        await until(lambda: all(now > was for now, was in zip(num_armed(), before, strict=True)))

    async def restarted(self, name: str) -> str:
        """Waits for the next death, which has to be of that process, and for its return. How it died."""
        async with asyncio.timeout(DEADLINE_S):
            died, again = [await self.cluster.next_change() for _ in range(2)]
        assert isinstance(died, Died)
        assert isinstance(again, Restarted)
        assert died.name == again.name == name
        return died.how

    async def command(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, output and errors of the `tandem` command towards this cluster."""
        return await tandem(*arguments, "--target", self.cluster.grpc)


async def tandem(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the `tandem` command, run in a thread: a process would take a second to import
    what is here. One at a time."""

    def run() -> int:
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    out, err = io.StringIO(), io.StringIO()
    argv = ["tandem", *arguments]
    with patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = await asyncio.to_thread(run)
    return status, out.getvalue(), err.getvalue()


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path,
    model: Path = DEMO,
    *,
    kind: Callable[[ClusterSpec], TandemCommands] = PatientCommands,
    api_key: str = "",
    **spec,
) -> AsyncIterator[Running]:
    """Starts a cluster on free ports and stops it."""
    wanted = ClusterSpec(
        model=model, http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=tmp_path,
        **{"num_kv_blocks": 256, "dtype": "fp32", **spec},
    )  # fmt: skip
    commands = kind(wanted)
    async with forked_services(), LocalCluster(wanted, commands=commands) as cluster:
        run = Running(cluster, commands, api_key)
        try:
            await run.until(lambda status: status.ready and all(w.connected for w in status.workers))
            yield run
        finally:
            await run.close()


async def gone(pid: int) -> None:
    """Waits until the process has ended."""

    def has_ended() -> bool:
        try:
            process = psutil.Process(pid)
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await until(has_ended)


def loads(status: inference_pb2.ClusterStatus) -> dict[str, types_pb2.Load]:
    """Each worker's last report, by name."""
    return {worker.worker.name: worker.load for worker in status.workers}
