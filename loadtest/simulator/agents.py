"""Agents over simulated workers: the real pool, scheduler and placement in virtual time, beside a clairvoyant pool.

An agent takes TURNS turns from FIRST_TOKENS to LAST_TOKENS, at times that its answers and the pauses of its tools set;
where an answer takes longer, the next turn follows it. Other prompts, each with blocks of its own, come in between.
Counted is what a turn finds of the turn before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import accumulate

from loadtest.simulator.cli import FleetOptions, WorkerOptions, setup_of
from loadtest.simulator.clock import Clock
from loadtest.simulator.fleet import WorkerSpec, World
from loadtest.simulator.prefix_index import PrefixIndex
from loadtest.simulator.request import SimRequest
from loadtest.simulator.simulation import COLLOCATED
from loadtest.simulator.tandem_router import TandemConfig, TandemRouter
from loadtest.simulator.worker import Worker
from shared.kv.pool import BlockPool

TURNS, FIRST_TOKENS, LAST_TOKENS = 43, 20_000, 140_000
PAUSE_S, ANSWER_S, ANSWER_TOKENS, OTHER_TOKENS = (5.0, 60.0), (2.0, 6.0), (200, 600), (2_000, 16_000)
BLOCK_SIZE = 512
"""Tokens of a block: sizes are those of long prompts."""
RETAIN_S = 300.0
MODEL, GPUS = "llama-3-8b", 8
LAST_USE, RETAINED, LEARNT, SAID, ORACLE = "by last use", "retained", "learnt", "said", "oracle"
"""Nothing is retained; retained without a session, so that last use decides; with one, whose pauses are learnt; and it
is said after each answer when its next turn comes, and when there is none; and a pool that knows it."""


@dataclass(frozen=True, slots=True)
class Agents:
    """A case."""

    num_agents: int = 8
    others_per_s: float = 2.0
    room: float = 0.6
    """What all pools hold, as a share of what all agents hold at their ends."""
    num_workers: int = 1
    seed: int = 0
    error: float = 0.0
    """Error of what is said: the standard deviation of the logarithm of its ratio to the pause."""

    def arrivals(self) -> tuple[list[list[float]], list[float]]:
        """Times of each agent's turns, and of the other prompts."""
        drawn = random.Random(self.seed)
        agents = []
        for _ in range(self.num_agents):
            gaps = [drawn.uniform(*ANSWER_S) + drawn.uniform(*PAUSE_S) for _ in range(TURNS - 1)]
            agents.append(list(accumulate(gaps, initial=drawn.uniform(0.0, 120.0))))
        end_s, others, at_s = max(map(max, agents)), [], 0.0
        while self.others_per_s and (at_s := at_s + drawn.expovariate(self.others_per_s)) < end_s:
            others.append(at_s)
        return agents, others


@dataclass(slots=True)
class Clairvoyant:
    """When each conversation's next turn comes, and whose a block is."""

    next_use_s: dict[int, float] = field(default_factory=dict)
    owner: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Conversation and place in its prompt, by hash; answers' blocks are never used again."""

    def rank(self, block: bytes | None) -> tuple[float, int]:
        """What is used last, and of a prompt its end, is first."""
        conversation, place = self.owner.get(block or b"", (-1, 0))
        return -self.next_use_s.get(conversation, math.inf), -place


class OraclePool(BlockPool):
    """Belady's choice among the same blocks: evicts the free one whose next use is furthest."""

    def __init__(self, num_blocks: int, block_size: int, known: Clairvoyant) -> None:
        super().__init__(num_blocks, block_size)
        self._known = known

    def allocate(self, num_blocks: int) -> list[int]:
        """See `BlockPool`."""
        free = self._lists.listed(self._free)
        cached = [block_id for block_id in free if self._is_findable(block_id)]
        missing = num_blocks - (len(free) - len(cached))
        for block_id in nsmallest(missing, cached, key=lambda block_id: self._known.rank(self._hashes[block_id])):
            block_hash = self._hashes[block_id]
            assert block_hash is not None
            self._forget(block_hash)
            self._lists.unlink(block_id)
            self._lists.link_after(self._free, block_id)
        return super().allocate(num_blocks)


class AgentRun(TandemRouter):
    """One run: the router, and the clients that ask it."""

    def __init__(self, case: Agents, way: str) -> None:
        """`way`: one of LAST_USE to ORACLE."""
        self.case, self.way, self.known = case, way, Clairvoyant()
        self.num_hits = self.num_usable = 0
        """Blocks of turns before that turns found, and all of them."""
        self.requests: list[SimRequest] = []
        self._arrivals, self._others = case.arrivals()
        self._drawn = random.Random(f"{case.seed}/lengths")
        self._turns = [0] * case.num_agents
        self._usable = [0] * case.num_agents  # blocks of the newest turn, by agent
        self._waiting = [0] * case.num_agents  # turns that have come and do not run, by agent
        self._running: set[int] = set()
        world = World(Clock(), PrefixIndex(BLOCK_SIZE, BLOCK_SIZE), seed=case.seed)
        config, spec = _config(case)
        workers = {}
        for number in range(case.num_workers):
            pool = OraclePool(spec.num_blocks, BLOCK_SIZE, self.known) if way == ORACLE else None
            workers[f"w{number}"] = Worker(world, f"w{number}", spec, pool=pool)
        super().__init__(world, workers, config, case.seed)

    def run(self) -> float:
        """Share of what turns before had that turns found."""
        for agent, times_s in enumerate(self._arrivals):
            self.known.next_use_s[agent] = times_s[0]
            for at_s in times_s:
                self.world.clock.at(at_s, self._come, agent)
        for number, at_s in enumerate(self._others, self.case.num_agents):
            tokens = self._drawn.randint(*OTHER_TOKENS)
            self.world.clock.at(at_s, self._submit, number, tokens, self._drawn.randint(*ANSWER_TOKENS), 0.0)
        self.world.clock.run()
        for worker in self.workers.values():
            worker.engine.scheduler.check_integrity()
        assert all(request.finished_s for request in self.requests), "every request was served"
        return self.num_hits / self.num_usable

    def _come(self, agent: int) -> None:
        self._waiting[agent] += 1
        self._ask(agent)

    def _ask(self, agent: int) -> None:
        if agent in self._running or not self._waiting[agent]:
            return
        self._waiting[agent] -= 1
        self._running.add(agent)
        num_output = self._drawn_for(agent).randint(*ANSWER_TOKENS)
        self._submit(agent, num_tokens(self._turns[agent]), num_output, RETAIN_S)

    def _drawn_for(self, agent: int) -> random.Random:
        """Random numbers of an agent's turn, the same ones in every way."""
        return random.Random(f"{self.case.seed}/{agent}/{self._turns[agent]}")

    def _submit(self, conversation: int, num_tokens: int, num_output: int, retain_s: float) -> None:
        """Prompt and answer are the beginning of the conversation's next prompt."""
        runs = tuple((conversation << 12) + place for place in range(-(-(num_tokens + num_output) // BLOCK_SIZE)))
        hashes = self.world.index.hashes(runs, num_tokens + num_output)
        if retain_s and self.way == ORACLE:
            self.known.owner |= {block: (conversation, place) for place, block in enumerate(hashes)}
        session = "" if self.way == RETAINED else f"{conversation}"
        retain_s = 0.0 if self.way in (LAST_USE, ORACLE) else retain_s
        request = SimRequest(
            len(self.requests), self.world.clock.now_s, num_tokens, num_output, runs, session, hashes, retain_s
        )
        self.requests.append(request)
        self.submit(request)

    def _on_done(self, request: SimRequest) -> None:
        super()._on_done(request)
        agent = request.runs[0] >> 12
        if agent >= self.case.num_agents:
            return
        turn = self._turns[agent] = self._turns[agent] + 1
        self.num_hits += min(self._usable[agent], request.num_cached_tokens // BLOCK_SIZE)
        self.num_usable += self._usable[agent]
        self._usable[agent] = (request.num_prompt_tokens + request.num_output_tokens - 1) // BLOCK_SIZE
        self._running.discard(agent)
        next_s = self.known.next_use_s[agent] = self._arrivals[agent][turn] if turn < TURNS else math.inf
        if self.way == SAID:
            error = self._drawn_for(agent).lognormvariate(0.0, self.case.error)
            self._say(request.session, max(0.0, next_s - self.world.clock.now_s) * error)
        self._ask(agent)

    def _say(self, session: str, said_s: float) -> None:
        for worker in self.workers.values():
            pool = worker.engine.pool

            def command(pool: BlockPool = pool) -> None:
                if math.isinf(said_s):
                    pool.close_session(session)
                else:
                    pool.expect(session, said_s)

            self.world.clock.after(self.message_s, worker.engine.submit, command)


def num_tokens(turn: int) -> int:
    """Tokens of a turn's prompt."""
    return round(FIRST_TOKENS + turn * (LAST_TOKENS - FIRST_TOKENS) / (TURNS - 1))


def _config(case: Agents) -> tuple[TandemConfig, WorkerSpec]:
    """The router's settings, by which nothing is refused, and a worker."""
    fleet = FleetOptions(prefill=0, decode=case.num_workers, ttft_s=1e6, seed=case.seed)
    setup = setup_of(WorkerOptions(model=MODEL, gpus=GPUS, chunk=8192), fleet, policy=COLLOCATED)
    num_blocks = round(case.room * case.num_agents * (LAST_TOKENS // BLOCK_SIZE) / case.num_workers)
    spec = replace(setup.worker, num_blocks=num_blocks, block_size=BLOCK_SIZE, residuals=())
    return replace(setup.tandem, mode="collocated"), spec


def hits(case: Agents, ways: Sequence[str]) -> dict[str, float]:
    """By way, the share of what turns before had that turns found."""
    return {way: AgentRun(case, way).run() for way in ways}
