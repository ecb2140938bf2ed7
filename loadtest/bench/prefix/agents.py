"""`python -m loadtest.bench agents`: what agents find again of their conversations in pools that others use too.

In virtual time (`loadtest/simulator/agents.py`) beside a clairvoyant pool; with `--model` once more by a real worker
over gRPC, tokens and times scaled down, beside what a clairvoyant cache of its size has of the same turns.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

from loadtest.rig.cluster import Extras, local_cluster
from loadtest.rig.command_line import Option, Out, decimals, integers
from loadtest.rig.results import Report, Result
from loadtest.simulator.agents import (
    LAST_TOKENS,
    LAST_USE,
    LEARNT,
    ORACLE,
    OTHER_TOKENS,
    RETAINED,
    SAID,
    TURNS,
    Agents,
    hits,
    num_tokens,
)
from tandem import AsyncTandemClient
from tandem.options import Options

BLOCK_SIZE, NUM_OUTPUT = 16, 8
"""Tokens of a block of the real worker, and of its answers."""


class Served(NamedTuple):
    """A prompt that the real worker served."""

    begin_s: float
    end_s: float
    conversation: int
    num_blocks: int
    num_known: int
    """Blocks of these that the turn before had already."""
    num_found: int


class RealRun:
    """The agents of a case as clients of one worker, each second of theirs 1 / `speed` of a second."""

    def __init__(self, case: Agents, way: str, most_tokens: int, speed: float) -> None:
        self.case, self.way, self.speed = case, way, speed
        self.num_blocks = round(case.room * case.num_agents * (most_tokens // BLOCK_SIZE))
        self.served: list[Served] = []
        self._share = (most_tokens - NUM_OUTPUT - 1) / LAST_TOKENS

    async def run(self, model: Path) -> float:
        """Share of what turns before had that turns found."""
        with tempfile.TemporaryDirectory() as folder:
            cluster = local_cluster(
                Extras(), mode="collocated", model=model, num_decode=1, num_kv_blocks=self.num_blocks,
                dtype="fp32", state_dir=Path(folder),
            )  # fmt: skip
            await cluster.start()
            try:
                async with AsyncTandemClient([cluster.grpc]) as client:
                    await self._ask(client)
            finally:
                await cluster.stop()
        return sum(served.num_found for served in self.served) / sum(served.num_known for served in self.served)

    async def _ask(self, client: AsyncTandemClient) -> None:
        agents, others = self.case.arrivals()
        lengths = random.Random(self.case.seed)
        self._begin_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for agent, times_s in enumerate(agents):
                tasks.create_task(self._agent(client, agent, times_s))
            for number, at_s in enumerate(others, self.case.num_agents):
                tasks.create_task(self._other(client, number, at_s, lengths.randint(*OTHER_TOKENS)))

    async def _agent(self, client: AsyncTandemClient, agent: int, times_s: Sequence[float]) -> None:
        options: Options = {} if self.way == LAST_USE else {"retention": "5m"}
        if self.way in (LEARNT, SAID):
            options["session"] = f"{agent}"
        num_known = 0
        for turn, at_s in enumerate(times_s):
            await self._until(at_s)
            num_known = await self._served(client, agent, num_tokens(turn), num_known, options)
            if self.way == SAID and turn + 1 < TURNS:
                left_s = self._begin_s + times_s[turn + 1] / self.speed - time.monotonic()
                await client.expect_session(f"{agent}", max(0.0, left_s))
            elif self.way == SAID:
                await client.close_session(f"{agent}")

    async def _other(self, client: AsyncTandemClient, number: int, at_s: float, count: int) -> None:
        await self._until(at_s)
        await self._served(client, number, count, 0, {})

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(self._begin_s + at_s / self.speed - time.monotonic())

    async def _served(
        self, client: AsyncTandemClient, conversation: int, count: int, num_known: int, options: Options
    ) -> int:
        """Asks a prompt of that many tokens before scaling; returns the number of its full blocks."""
        drawn, begin_s = random.Random(conversation), time.monotonic()
        num_blocks = max(1, int(count * self._share) // BLOCK_SIZE)
        token_ids = [drawn.randrange(20, 2000) for _ in range(num_blocks * BLOCK_SIZE)]
        asked: Options = {**options, "max_tokens": NUM_OUTPUT, "ignore_eos": True}
        answer = await client.generate([*token_ids, 7], **asked)
        found = min(answer.usage.num_cached_tokens // BLOCK_SIZE, num_known)
        self.served.append(Served(begin_s, time.monotonic(), conversation, num_blocks, num_known, found))
        return num_blocks


def clairvoyant_hits(served: Sequence[Served], num_blocks: int) -> float:
    """What a cache of this size has of the turns that agents took, where it evicts, of conversations that do not run,
    the end of that which comes back last."""
    coming: dict[int, list[float]] = {}
    for one in sorted(served, reverse=True):
        coming.setdefault(one.conversation, []).append(one.begin_s)
    events = sorted([(one.begin_s, True, one) for one in served] + [(one.end_s, False, one) for one in served])
    held: dict[int, int] = {}  # blocks, by conversation
    used: dict[int, int] = {}
    num_hits = 0
    for _, begins, one in events:
        if not begins:
            held[one.conversation] = used.pop(one.conversation)
            continue
        coming[one.conversation].pop()
        num_hits += min(held.pop(one.conversation, 0), one.num_known)
        used[one.conversation] = one.num_blocks
        while held and (excess := sum(held.values()) + sum(used.values()) - num_blocks) > 0:
            last = max(held, key=lambda name: coming[name][-1] if coming[name] else math.inf)
            held[last] -= min(excess, held[last])
            if not held[last]:
                del held[last]
    return num_hits / sum(one.num_known for one in served)


def _real(case: Agents, model: Path, context: int, speed: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for way in (LAST_USE, RETAINED, LEARNT, SAID):
        run = RealRun(case, way, context, speed)
        found[way] = asyncio.run(run.run(model))
        found[ORACLE] = clairvoyant_hits(run.served, run.num_blocks)  # of the last one's turns
    return found


def main(
    agents: Annotated[int, Option("conversations at once")] = 8,
    others: Annotated[float, Option("other prompts a second")] = 2.0,
    room: Annotated[str, Option("sizes of the pools, as shares of what all agents hold at their ends")] = "1 0.6 0.3",
    workers: Annotated[int, Option("of both roles, among which the router chooses")] = 1,
    errors: Annotated[str, Option("of what is said: standard deviations of its logarithm")] = "0.1 0.25",
    seeds: Annotated[str, Option("a run for each")] = "0",
    model: Annotated[Path | None, Option("a model's folder: a real worker that serves it")] = None,
    context: Annotated[int, Option("longest prompt there, tokens")] = 1985,
    speed: Annotated[float, Option("of its time")] = 25.0,
    out: Out = None,
) -> None:
    """Compare what agents find again of their conversations by what is known of their next turns."""
    report = Report(out)
    for share in decimals(room, "room"):
        for seed in integers(seeds, "seeds"):
            case = Agents(agents, others, share, workers, seed)
            if model is not None:
                found = _real(case, model, context, speed)
            else:
                found = hits(case, (LAST_USE, RETAINED, LEARNT, SAID, ORACLE))
                for error in decimals(errors, "errors"):
                    found[f"{SAID}, {error:.0%} off"] = hits(replace(case, error=error), (SAID,))[SAID]
            name = f"{agents} agents, {others:g} others/s, pool {share:g}, seed {seed}"
            report.add(
                Result(f"{name}: {way}", 100 * value, "%", peer=ORACLE, ratio=value / found[ORACLE])
                for way, value in found.items()
            )
            report.add([Result(f"{name}: {SAID} over {LAST_USE}", found[SAID] / found[LAST_USE], "x")])
    report.print()
