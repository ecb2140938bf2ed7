"""`python -m loadtest.bench agents`: what retention brings conversations of agents in one pool that others use too.

Virtual time and the real `BlockPool`, without a model. Agents take 43 turns from 20,000 to 140,000 tokens, with pauses
of 5 to 60 seconds for their tools; other prompts come in between. Counted is what a turn finds of the turn before it:
by last use alone, retained for five minutes, and with an oracle that evicts what is used again last.

With `--model` the same prompts go to a cluster of real processes, scaled to the model's context and in the order of
their arrival without the time between: one worker that prefills and decodes, over gRPC, `retention` by the request.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from loadtest.rig.cluster import Extras, local_cluster
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from shared.kv.pool import BlockPool
from tandem import AsyncTandemClient
from tandem.options import Options

BLOCK_SIZE = 512
"""Tokens of a block: sizes are those of long prompts."""
SMALL_BLOCK = 16
"""Of a real worker."""
TURNS, FIRST_TOKENS, LAST_TOKENS = 43, 20_000, 140_000
PAUSE_S, ANSWER_S = (5.0, 60.0), (2.0, 6.0)
OTHER_TOKENS = (2_000, 16_000)
RETAIN_S = 300.0
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """A prompt."""

    at_s: float
    conversation: int
    num_blocks: int
    num_known: int
    """Of these, the turn before had."""


def arrivals(num_agents: int, others_per_s: float, seed: int = 0) -> list[Arrival]:
    """By time, until the last agent has finished."""
    drawn = random.Random(seed)
    found: list[Arrival] = []
    growth = (LAST_TOKENS - FIRST_TOKENS) / (TURNS - 1)
    for agent in range(num_agents):
        at_s, known = drawn.uniform(0, 120), 0
        for turn in range(TURNS):
            count = round(FIRST_TOKENS + turn * growth) // BLOCK_SIZE
            found.append(Arrival(at_s, agent, count, known))
            at_s, known = at_s + drawn.uniform(*ANSWER_S) + drawn.uniform(*PAUSE_S), count
    end_s, at_s, number = max(found).at_s, 0.0, num_agents
    while others_per_s and (at_s := at_s + drawn.expovariate(others_per_s)) < end_s:
        found.append(Arrival(at_s, number, drawn.randint(*OTHER_TOKENS) // BLOCK_SIZE, 0))
        number += 1
    return sorted(found)


def pool_hits(prompts: Sequence[Arrival], num_blocks: int, num_agents: int, retain_s: float) -> float:
    """Share of what the turns before had that a pool of this size still has."""
    now_s = 0.0
    pool = BlockPool(num_blocks, BLOCK_SIZE, clock=lambda: now_s)
    num_hits = 0
    for prompt in prompts:
        now_s = prompt.at_s
        names = [b"%d/%d" % (prompt.conversation, place) for place in range(prompt.num_blocks)]
        found = pool.match(names)
        pool.acquire(found)
        blocks = found + pool.allocate(len(names) - len(found))
        for block_id, name in zip(blocks, names, strict=True):
            pool.seal(block_id, name)
        pool.release(blocks, retain_s if prompt.conversation < num_agents else 0.0)
        num_hits += min(len(found), prompt.num_known)
    return num_hits / sum(prompt.num_known for prompt in prompts)


def oracle_hits(prompts: Sequence[Arrival], num_blocks: int) -> float:
    """Likewise, of a cache that knows when each conversation comes back, and cuts the one that does last."""
    held: dict[int, int] = {}  # blocks by conversation
    coming: dict[int, list[float]] = {}
    for prompt in reversed(prompts):
        coming.setdefault(prompt.conversation, []).append(prompt.at_s)
    num_hits = 0
    for prompt in prompts:
        coming[prompt.conversation].pop()
        num_hits += min(held.get(prompt.conversation, 0), prompt.num_known)
        held[prompt.conversation] = prompt.num_blocks
        while (excess := sum(held.values()) - num_blocks) > 0:
            last = max(held, key=lambda name: coming[name][-1] if coming[name] else _NEVER)
            held[last] -= min(excess, held[last])
            if not held[last]:
                del held[last]
    return num_hits / sum(prompt.num_known for prompt in prompts)


async def cluster_hits(
    prompts: Sequence[Arrival], num_blocks: int, num_agents: int, retention: str, model: Path, folder: Path
) -> float:
    """As `pool_hits`, of a real worker with a pool of this size, as the answers say."""
    cluster = local_cluster(
        Extras(), mode="collocated", model=model, num_decode=1, num_kv_blocks=num_blocks, dtype="fp32", state_dir=folder
    )
    await cluster.start()
    num_hits = 0
    try:
        async with AsyncTandemClient([cluster.grpc]) as client:
            for prompt in prompts:
                is_agent = prompt.conversation < num_agents
                drawn = random.Random(prompt.conversation)
                token_ids = [drawn.randrange(20, 2000) for _ in range(prompt.num_blocks * SMALL_BLOCK)]
                options: Options = {"max_tokens": 1, "temperature": 0.0}
                if is_agent:
                    options |= {"retention": retention, "session": f"{prompt.conversation}"}
                answer = await client.generate([*token_ids, 7], **options)
                num_hits += min(answer.usage.num_cached_tokens // SMALL_BLOCK, prompt.num_known)
    finally:
        await cluster.stop()
    return num_hits / sum(prompt.num_known for prompt in prompts)


def scaled(prompts: Sequence[Arrival], most_tokens: int) -> list[Arrival]:
    """The same arrivals, of which the longest has as many tokens in blocks of SMALL_BLOCK, and one more."""
    share = (most_tokens - 1) // SMALL_BLOCK / max(prompt.num_blocks for prompt in prompts)

    def of(count: int) -> int:
        return max(1, int(count * share)) if count else 0

    return [replace(p, num_blocks=of(p.num_blocks), num_known=of(p.num_known)) for p in prompts]


async def _measured(prompts: Sequence[Arrival], size: int, agents: int, model: Path | None) -> tuple[float, float]:
    """By last use, and retained."""
    if model is None:
        plain, retained = (pool_hits(prompts, size, agents, retain_s) for retain_s in (0.0, RETAIN_S))
        return plain, retained
    found = []
    for retention in ("in-memory", "5m"):
        with tempfile.TemporaryDirectory() as folder:
            found.append(await cluster_hits(prompts, size, agents, retention, model, Path(folder)))
    return found[0], found[1]


def main(
    agents: Annotated[int, Option("conversations at once")] = 8,
    others: Annotated[float, Option("other prompts a second")] = 2.0,
    room: Annotated[str, Option("sizes of the pool, as shares of what all agents hold at their ends")] = "0.8 1.1 1.6",
    seed: Annotated[int, Option("of the arrivals")] = 0,
    model: Annotated[Path | None, Option("a model's folder: real processes that serve it")] = None,
    context: Annotated[int, Option("longest prompt there, tokens")] = 1985,
    out: Out = None,
) -> None:
    """Compare what agents find again of their conversations, retained and not."""
    report, prompts = Report(out), arrivals(agents, others, seed)
    if model is not None:
        prompts = scaled(prompts, context)
    largest = agents * max(prompt.num_blocks for prompt in prompts)
    for share in map(float, room.split()):
        size = round(share * largest)
        plain, retained = asyncio.run(_measured(prompts, size, agents, model))
        best = oracle_hits(prompts, size)
        name = f"{agents} agents, {others:g} others/s, pool {share:g}"
        report.add(
            [
                Result(f"{name}: by last use", 100 * plain, "%"),
                Result(f"{name}: retained", 100 * retained, "%", peer="by last use", ratio=retained / plain),
                Result(f"{name}: oracle", 100 * best, "%", peer="retained", ratio=best / retained),
            ]
        )
    report.print()
