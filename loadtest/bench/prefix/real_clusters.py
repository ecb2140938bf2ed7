"""The measured clusters, real processes started as in a deployment, and a client that records how they served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.prefix.ideal import BLOCK_SIZE, Prompt
from loadtest.clients.base import Call, RequestFailed
from loadtest.clients.grpc_client import GrpcClient
from loadtest.clients.target import parse_target
from loadtest.records import Reply
from loadtest.rig.cluster import Extras, local_cluster
from loadtest.rig.models import DEMO, write_model
from services.local.cluster import LocalCluster
from shared.errors import DeadlineExceeded, Internal
from shared.model.families.registry import load_config
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.settings.common import PrefixFetch

REQUEST_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster."""

    name: str
    model: Path
    num_workers: int
    """Workers in each pool."""
    pool_blocks: int
    """Blocks of each worker."""
    store_blocks: int = 0
    """Blocks in the store's host memory; 0 = no store."""
    indexed: bool = True
    """Whether the router uses the index. Without it, the router places prompts by load only, with random ties."""
    prefix_fetch: PrefixFetch = "always"
    send_bytes_per_s: float = 0.0
    """Limit of the store's sending rate; 0 = no limit."""


def make_cluster(setup: Setup, folder: Path) -> LocalCluster:
    """A cluster that has not been started, on free ports, with its logs under `folder`. Raises ModelLoadError."""
    block_bytes = load_config(setup.model).block_layout(BLOCK_SIZE, "float32").block_bytes
    return local_cluster(
        Extras(store_flags=("--send-bytes-per-s", str(setup.send_bytes_per_s)), indexed=setup.indexed),
        model=setup.model,
        num_prefill=setup.num_workers,
        num_decode=setup.num_workers,
        dtype="fp32",
        num_kv_blocks=setup.pool_blocks,
        store_host_bytes=setup.store_blocks * block_bytes,
        prefix_fetch=setup.prefix_fetch,
        state_dir=folder / setup.name,
    )


def write_tiny_model(folder: Path) -> Path:
    """A model that needs almost no compute: the content of a cache does not depend on the model's size."""
    return write_model(folder, {"head_dim": 8}, DEMO)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answered request."""

    prompt: Prompt
    prefill_worker: str
    num_cached_tokens: int
    ttft_s: float
    """Seconds from sending to the first token."""


class Client:
    """A client of one router; an asynchronous context manager."""

    def __init__(self, address: str) -> None:
        """`address`: host:port of its gRPC API."""
        self._client = GrpcClient(parse_target(f"grpc://{address}"))

    async def __aenter__(self) -> Client:
        await self._client.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, prompt: Prompt) -> Outcome:
        """Sends one prompt and reads its whole answer; raises Internal if it fails."""
        reply = Reply()
        request = self._client.encode(Call("", prompt.token_ids, prompt.num_output_tokens))
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._client.generate(request, reply)
        except (RequestFailed, TimeoutError) as error:
            raise Internal(f"a prompt of {len(prompt.token_ids)} tokens failed: {error}") from error
        assert reply.sent_s is not None
        return Outcome(
            prompt, reply.prefill_worker, reply.num_cached_tokens or 0, reply.token_times_s[0] - reply.sent_s
        )

    async def replay(self, prompts: Sequence[Prompt], in_flight: int, limit_s: float) -> list[Outcome]:
        """Sends the prompts in their order, the next one when fewer than `in_flight` are running; none after `limit_s`
        seconds. Returns the outcomes in the order of sending; raises an ExceptionGroup of Internal."""
        gate = asyncio.Semaphore(in_flight)
        ends = time.perf_counter() + limit_s
        asked = []
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                await gate.acquire()
                if time.perf_counter() >= ends:
                    break
                task = group.create_task(self.ask(prompt))
                task.add_done_callback(lambda _: gate.release())
                asked.append(task)
        return [task.result() for task in asked]

    async def fetched_tokens(self) -> dict[str, int]:
        """Prompt tokens that the prefill workers fetched since their start, by source.

        Waits until no request runs, so that the workers' reports are final; raises DeadlineExceeded.
        """
        ends = time.perf_counter() + IDLE_TIMEOUT_S
        while True:
            status = await self._client.status()
            loads = [each.load for each in status.workers if each.role == types_pb2.WORKER_ROLE_PREFILL]
            if all(load.num_free_blocks == load.num_total_blocks for load in loads):
                return {place: sum(getattr(load, field) for load in loads) for place, field in _places().items()}
            if time.perf_counter() > ends:
                raise DeadlineExceeded(f"the workers are not idle after {IDLE_TIMEOUT_S:g} s", limit=IDLE_TIMEOUT_S)
            await asyncio.sleep(_POLL_S)


def _places() -> dict[str, str]:
    """Each source of fetched tokens in a worker's report → the report's field."""
    names = sorted((field.name for field in types_pb2.Load.DESCRIPTOR.fields), reverse=True)
    return {
        name.removeprefix("num_").removesuffix("_hit_tokens"): name
        for name in names
        if name.endswith("_hit_tokens") and name != "num_prefix_hit_tokens"
    }
