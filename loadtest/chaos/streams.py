"""Greedy streams at once, what each of them got, and what it would have got undisturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from shared.errors import Internal
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from shared.rpc.server import channel

PROMPT_LEN = 500
ANSWER_LEN = 96
RECONNECT_PAUSE_S = 0.1
ANSWER_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Stream:
    """One client's answer. Times are of time.monotonic()."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    started_at: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each message with tokens came."""
    error: str = ""
    """Why the answer is not complete; empty where it is."""
    num_reconnects: int = 0
    model: str = ""
    """Asked for; empty: the base model."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; 0 where none came."""
        return self.times[0] - self.started_at if self.times else 0.0

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two messages, seconds."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def prompts(count: int, length: int = PROMPT_LEN) -> list[list[int]]:
    """Token ids of the demo model; no two prompts begin alike."""
    return [
        [20 + (place * (37 + 2 * number)) % 2000 for place in range(number, number + length)] for number in range(count)
    ]


class Streams:
    """All streams of one trial. `start()` sends all at once; `wait()` for their ends."""

    def __init__(
        self,
        targets: Sequence[str],
        texts: Sequence[list[int]],
        salt: str,
        *,
        resuming: bool,
        answer_len: int = ANSWER_LEN,
        models: Sequence[str] = ("",),
    ) -> None:
        """`targets` are the routers' gRPC addresses, which the clients begin with in turn. Requests share cached
        prefixes with those of the same `salt` alone. A `resuming` client whose connection breaks asks the next router
        with what it has, as often as it takes. `models`: of the streams in turn; empty: the base model."""
        self.all = [Stream(list(text), model=models[number % len(models)]) for number, text in enumerate(texts)]
        self._targets = targets
        self.salt = salt
        self._resuming = resuming
        self._answer_len = answer_len
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Sends all requests."""
        self._tasks = [asyncio.create_task(self._run(stream, number)) for number, stream in enumerate(self.all)]

    async def wait(self, timeout_s: float) -> None:
        """Returns when all have ended; those that have not by then are cancelled and count as lost."""
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return sum(not task.done() for task in self._tasks)

    @property
    def num_answering(self) -> int:
        """Streams with a token."""
        return sum(bool(stream.tokens) for stream in self.all)

    async def _run(self, stream: Stream, number: int) -> None:
        stream.started_at = time.monotonic()
        stream.error = "not answered in time"
        while True:
            try:
                target = self._targets[(number + stream.num_reconnects) % len(self._targets)]
                async with channel(target) as opened:
                    await self._read(inference_pb2_grpc.InferenceServiceStub(opened), stream)
            except grpc.aio.AioRpcError as error:
                stream.error = f"{error.code().name}: {error.details()}"
                if not self._resuming or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    return
                stream.num_reconnects += 1
                await asyncio.sleep(RECONNECT_PAUSE_S)
                continue
            stream.error = ""
            return

    async def _read(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, stream: Stream) -> None:
        """Greedy: what is left of an answer follows from prompt and tokens alone."""
        left = self._answer_len - len(stream.tokens)
        if not left:
            return
        request = inference_pb2.GenerateRequest(
            model=stream.model,
            tokens=inference_pb2.TokenIds(ids=stream.prompt + stream.tokens),
            sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=left, ignore_eos=True),
            cache_salt=self.salt,
        )
        async for message in stub.Generate(request):
            if message.token_ids:
                stream.tokens += message.token_ids
                stream.times.append(time.monotonic())


async def ask(
    targets: Sequence[str], texts: Sequence[list[int]], salt: str, *, resuming: bool, models: Sequence[str] = ("",)
) -> list[Stream]:
    """Sends all requests at once and returns their streams at their ends."""
    streams = Streams(targets, texts, salt, resuming=resuming, models=models)
    streams.start()
    await streams.wait(ANSWER_TIMEOUT_S)
    return streams.all


async def undisturbed(
    targets: Sequence[str], texts: Sequence[list[int]], salt: str, models: Sequence[str] = ("",)
) -> list[Stream]:
    """The answers without a fault. Raises Internal where they fail: nothing can be compared."""
    streams = await ask(targets, texts, salt, resuming=False, models=models)
    if errors := {stream.error for stream in streams if stream.error}:
        raise Internal(f"undisturbed streams fail: {', '.join(sorted(errors))}")
    return streams
