"""A client that sends prompts in their order and records how each was served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc.aio

from loadtest.bench.prefix.prompts import Prompt
from shared.errors import DeadlineExceeded, Internal
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from shared.rpc.server import channel

REQUEST_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answered request."""

    prompt: Prompt
    prefill_worker: str
    num_cached_tokens: int
    ttft_s: float
    """From sending to the first token."""


class Client:
    """A client of one router; an asynchronous context manager."""

    def __init__(self, address: str) -> None:
        """`address`: host:port of its gRPC API."""
        self._channel = channel(address)
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self._channel
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def ask(self, prompt: Prompt) -> Outcome:
        """Sends one prompt and reads its whole answer; raises Internal if it fails."""
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=prompt.token_ids),
            sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=prompt.num_output_tokens, ignore_eos=True),
        )
        sent = time.perf_counter()
        first = 0.0
        last = inference_pb2.GenerateResponse()
        try:
            async for message in self._stub.Generate(request, timeout=REQUEST_TIMEOUT_S):
                last = message
                first = first or time.perf_counter()
        except grpc.aio.AioRpcError as error:
            raise Internal(
                f"a prompt of {len(prompt.token_ids)} tokens failed: {error.code().name}: {error.details()}"
            ) from error
        return Outcome(prompt, last.prefill_worker, last.usage.num_cached_tokens, first - sent)

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
            status = await self._stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=REQUEST_TIMEOUT_S)
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
