"""One client request that asks for several answers: its sub-requests, and their deltas as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from hashlib import blake2b

from services.router.edge.generation import Generation, OutputDelta
from services.router.request import Request

_QUEUE_LEN = 64
"""Deltas that may wait for a slow client, all choices together; beyond that they wait in the core."""


def derived_seed(seed: int, index: int) -> int:
    """Seed of answer `index` to one prompt, 64 bits: the request's own for the first, else hashed from it."""
    if index == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sub_requests(prompts: Sequence[Request], n: int) -> list[Request]:
    """`n` requests a prompt, in choice order (prompt by prompt), each with its own id and seed."""
    if len(prompts) * n == 1:
        return list(prompts)
    fanned: list[Request] = []
    for prompt in prompts:
        seed = prompt.sampling.seed
        assert seed is not None, "the input_processor resolves seeds"
        for index in range(n):
            fanned.append(
                replace(
                    prompt,
                    request_id=f"{prompt.request_id}-{len(fanned)}",
                    sampling=replace(prompt.sampling, seed=derived_seed(seed, index)),
                )
            )
    return fanned


async def interleave(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """(choice index, delta) as they come, each choice in its own order; the first failure ends all of them.

    Close it (`contextlib.aclosing`); closing it does not close the generations.
    """
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue(_QUEUE_LEN)

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await queue.put((index, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(i, generation)) for i, generation in enumerate(generations)]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
