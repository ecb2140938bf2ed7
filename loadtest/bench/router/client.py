"""Clients of the router: `python -m loadtest.bench.router.client --target host:port --out FILE …` runs one load.

Open loop (`--rate`): one request every 1/rate seconds for `--duration` seconds, independent of the others' progress.
Closed loop (`--in-flight`): that many answers stream all the time. FILE gets {"requests": {id: [sent, first]},
"num_tokens", "num_messages", "tokens_per_s", "num_failed", "failure"}; times are `time.perf_counter()` seconds. The
rate is measured in a window without the start of a closed loop.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import uvloop

from loadtest.bench.router.http2 import Connection
from loadtest.rig.command_line import Option, run
from shared.errors import ConfigError
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

START_S = 2.0
"""A closed loop's streams all start within this time, which is not measured. Seconds."""
VOCAB = range(260, 1260)
NUM_CONNECTIONS = 4
TIMEOUT_S = 120.0
_GENERATE = "/tandem.v1.InferenceService/Generate"


class Load:
    """One process's requests and their outcomes."""

    def __init__(self, connections: Sequence[Connection], prompt_tokens: int, max_tokens: int, prefix: str) -> None:
        self._connections = connections
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._prefix = prefix
        self._count = 0
        self._random = random.Random(prefix)
        self.requests: dict[str, tuple[float, float]] = {}
        self.num_tokens = 0
        self.num_messages = 0
        self.num_failed = 0
        self.failure = ""
        self.tokens_per_s = 0.0

    async def one(self) -> None:
        """Sends one request and reads its whole answer."""
        self._count += 1
        request_id = f"{self._prefix}{self._count}"
        connection = self._connections[self._count % len(self._connections)]
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            tokens=inference_pb2.TokenIds(ids=self._random.choices(VOCAB, k=self._prompt_tokens)),
            sampling=types_pb2.SamplingParams(max_tokens=self._max_tokens, ignore_eos=True, seed=1),
        )
        body = request.SerializeToString()
        sent, first, finished = perf_counter(), 0.0, False

        def take(data: bytes) -> None:
            nonlocal first, finished
            message = inference_pb2.GenerateResponse.FromString(data)
            num_tokens = len(message.token_ids)
            if num_tokens and not first:
                first = perf_counter()
            self.num_tokens += num_tokens
            self.num_messages += 1
            finished = message.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED

        try:
            async with asyncio.timeout(TIMEOUT_S):
                await connection.call(_GENERATE, body, take)
        except TimeoutError:
            self.failure = f"{request_id} has not ended within {TIMEOUT_S:g} s"
        else:
            self.failure = self.failure if finished else f"{request_id} ended without a finish reason"
        if finished:
            self.requests[request_id] = (sent, first)
        else:
            self.num_failed += 1

    async def open_loop(self, rate: float, duration_s: float) -> None:
        """Afterwards `tokens_per_s` is the rate from the first request to the last answer."""
        began = perf_counter()
        tasks = set()
        for number in range(round(rate * duration_s)):
            await asyncio.sleep(max(0.0, began + number / rate - perf_counter()))
            tasks.add(asyncio.create_task(self.one()))
        await asyncio.wait(tasks)
        self.tokens_per_s = self.num_tokens / (perf_counter() - began)

    async def closed_loop(self, in_flight: int, duration_s: float) -> None:
        """Afterwards `tokens_per_s` is the rate in the window."""
        users = [asyncio.create_task(self._user(START_S * i / in_flight)) for i in range(in_flight)]
        await asyncio.sleep(2 * START_S)
        before, began = self.num_tokens, perf_counter()
        await asyncio.sleep(duration_s)
        self.tokens_per_s = (self.num_tokens - before) / (perf_counter() - began)
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)

    async def _user(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:
            await self.one()


def main(
    target: Annotated[str, Option(help="host:port of a router's gRPC API")],
    max_tokens: Annotated[int, Option()],
    duration: Annotated[float, Option(help="seconds")],
    out: Annotated[Path, Option()],
    prompt_tokens: Annotated[int, Option()] = 500,
    prefix: Annotated[str, Option(help="prefix of request ids")] = "r",
    rate: Annotated[float | None, Option(help="open loop: requests per second")] = None,
    in_flight: Annotated[int | None, Option(help="closed loop: concurrent streams")] = None,
) -> None:
    """See the module's docstring."""
    if (rate is None) == (in_flight is None):
        raise ConfigError("either --rate or --in-flight", field="rate")

    async def send() -> Load:
        connections = [await Connection.open(target) for _ in range(NUM_CONNECTIONS)]
        load = Load(connections, prompt_tokens, max_tokens, prefix)
        await (load.closed_loop(in_flight, duration) if in_flight else load.open_loop(rate or 0.0, duration))
        for connection in connections:
            connection.close()
        return load

    load = uvloop.run(send())
    figures = {
        "requests": load.requests,
        "num_tokens": load.num_tokens,
        "num_messages": load.num_messages,
        "tokens_per_s": load.tokens_per_s,
        "num_failed": load.num_failed,
        "failure": load.failure,
    }
    out.write_text(json.dumps(figures))


if __name__ == "__main__":
    run(main)
