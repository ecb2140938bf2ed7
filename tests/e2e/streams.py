"""Many streams of a real cluster at once, and a fault in their midst: each gives what it gives undisturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from tests.e2e.running import Running
from tests.waiting import DEADLINE_S, until

NUM_STREAMS = 20
FIELDS = {"max_tokens": 900, "ignore_eos": True}


def prompt(number: int, length: int = 60) -> list[int]:
    """Token ids that differ from those of any other number from the second on."""
    return [20 + (i * (37 + 2 * number)) % 2000 for i in range(length)]


class Streams:
    """Greedy answers to several prompts, streamed at once. A stream that fails raises at `ended`."""

    def __init__(self, cluster: Running, prompts: Sequence[list[int]], **fields: object) -> None:
        """Begins them; `fields` are the request's."""
        self.tokens: list[list[int]] = [[] for _ in prompts]
        """What has come of each."""
        self.longest_pause_s = 0.0
        """Between two events of one stream."""
        self._tasks = [
            asyncio.create_task(self._read(cluster, prompt, tokens, fields))
            for prompt, tokens in zip(prompts, self.tokens, strict=True)
        ]

    async def _read(self, cluster: Running, prompt: list[int], tokens: list[int], fields: dict[str, object]) -> None:
        last = time.monotonic()
        async for token_ids in cluster.streamed(prompt, **fields):
            now = time.monotonic()
            if tokens:
                self.longest_pause_s = max(self.longest_pause_s, now - last)
            last = now
            tokens += token_ids

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return sum(not task.done() for task in self._tasks)

    async def begun(self, num: int | None = None, num_tokens: int = 3) -> None:
        """Waits until `num` of them, by default all, have that number of tokens or have ended."""
        wanted = len(self.tokens) if num is None else num

        def have_begun() -> bool:
            pairs = zip(self.tokens, self._tasks, strict=True)
            return sum(len(tokens) >= num_tokens or task.done() for tokens, task in pairs) >= wanted

        await until(have_begun)

    async def ended(self) -> list[list[int]]:
        """The tokens of all, once they have ended."""
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._tasks)
        return self.tokens


async def undisturbed(
    cluster: Running, max_tokens: int = FIELDS["max_tokens"], num: int = NUM_STREAMS
) -> list[list[int]]:
    """What the streams of `under_fault` give when nothing happens."""
    fields = {**FIELDS, "max_tokens": max_tokens}
    return list(await asyncio.gather(*(cluster.tokens(prompt(n), **fields) for n in range(num))))


async def under_fault(
    cluster: Running,
    fault: Callable[[Streams], Awaitable[None]],
    expected: list[list[int]],
    max_tokens: int = FIELDS["max_tokens"],
    num_begun: int | None = None,
) -> Streams:
    """As many streams as `expected` has, `num_begun` of which decode when `fault` strikes; they give exactly that."""
    streams = Streams(cluster, [prompt(n) for n in range(len(expected))], **{**FIELDS, "max_tokens": max_tokens})
    await streams.begun(num_begun)
    await fault(streams)
    assert await streams.ended() == expected
    return streams
