"""Thousands of random lives: requests come, are cancelled, end, are preempted, and nothing stays behind."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import pytest

from shared.engine.plan import NoToken, SampledToken, StepResult
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import Goal, Status
from shared.errors import Overloaded
from shared.kv.pool import BlockPool
from tests.unit.engine.block_memory import BlockMemory
from tests.unit.engine.builders import sequence

BLOCK = 4
MAX_STEPS = 600
"""More than any of these lives takes; a life that hangs would take them all."""


class Life:
    """One scheduler with a tiny pool, from its first request until it is empty again."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        num_blocks = rng.randint(6, 20)
        num_slots = rng.choice((0, 5, 30))
        config = SchedulerConfig(
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(1, 24),
            output_quantile=rng.choice((0.0, 0.0, 0.6, 1.0)),
            first_output_guess=rng.randint(1, 8),
            num_host_blocks=num_slots,
            tpot_target_s=rng.choice((0.0, 2.5)),
            max_overtaken_s=rng.choice((0.0, 6.0)),
            max_unsent_share=rng.choice((0.1, 1.0)),
        )
        self.pool = BlockPool(num_blocks, BLOCK)
        self.now = 0.0
        self.scheduler = Scheduler(self.pool, config, lambda: self.now)
        self.memory = BlockMemory(num_blocks, num_slots, BLOCK)
        self.all = {}
        self.flying = deque()
        self.shipped = []
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """What happened, by name. Raises AssertionError where something hangs or leaks."""
        steps = (self.come, self.step, self.arrive, self.sent, self.cancel)
        for step in self.rng.choices(steps, (4, 12, 3, 3, 1), k=self.rng.randint(5, 60)):
            step()
        self.scheduler.check_integrity()
        for _ in range(MAX_STEPS):
            for item in self.receiving():
                self.rng.choice((self.join, self.join, self.give_up))(item)
            while self.shipped:
                self.sent()
            if not self.scheduler.has_work and not self.flying:
                break
            self.step()
        scheduler = self.scheduler
        assert not scheduler.has_work, "a sequence never ended"
        scheduler.check_integrity()
        assert self.pool.num_used == 0, "a block leaked"
        assert all(item.status is Status.FINISHED and not item.host_slots for item in self.all.values())
        self.seen["preempted"] = scheduler.counters.num_preemptions
        self.seen["swapped"] = scheduler.counters.num_swapped_in
        return self.seen

    def come(self) -> None:
        rng, name = self.rng, f"s{len(self.all)}"
        most = (self.pool.num_blocks - 1) * BLOCK
        tokens = [rng.randint(2, 3) for _ in range(rng.randint(1, min(30, most - 1)))]
        kind = rng.choice(("prefill", "reserve", "add"))
        if kind == "prefill":
            receiver = rng.choice((b"x", b"y"))
            item = sequence(name, tokens, goal=Goal.FIRST_TOKEN, ship_blocks=frozenset(range(8)), receiver=receiver)
        else:
            item = sequence(name, tokens, max_tokens=min(rng.randint(1, 50), most - len(tokens)))
        if kind == "reserve":
            try:
                self.memory.receive(item, self.scheduler.reserve(item), whole=False)
            except Overloaded:
                self.seen["refused"] += 1
                return
        else:
            self.scheduler.add(item)
        self.seen[kind] += 1
        self.all[name] = item

    def step(self) -> None:
        if len(self.flying) < 2:
            plan = self.scheduler.schedule()
            if not plan.is_empty:
                self.memory.launch(plan, self.all)
                self.flying.append(plan)
                if self.rng.random() < 0.4:
                    return
        if self.flying:
            plan = self.flying.popleft()
            tokens = [self.rng.choice((1, 2, *[3] * 30)) for item in plan.sequences if item.sample is not None]
            broken = self.rng.random() < 0.01
            sampled = tuple(NoToken() if broken else SampledToken(token) for token in tokens)
            self.now += 1.0
            outcome = self.scheduler.apply(plan, StepResult(sampled), float(len(plan.sequences)))
            self.shipped += outcome.blocks
            self.seen["finished"] += sum(token.finish_reason is not None for token in outcome.tokens)
            self.seen["broken"] += len(self.scheduler.take_failed())

    def receiving(self) -> list:
        return [item for item in self.all.values() if item.status is Status.RECEIVING]

    def arrive(self) -> None:
        for item in self.receiving()[:1]:
            self.join(item)

    def join(self, item) -> None:
        first = item.num_computed_tokens // BLOCK
        needed = range(first, -(-item.num_tokens // BLOCK))
        bad = first if len(needed) and self.rng.random() < 0.1 else None
        self.memory.receive(item, needed, whole=bad is None)
        self.scheduler.join(item.sequence_id, self.rng.choice((1, 3, 3)), dict.fromkeys(needed, 7), bad)

    def give_up(self, item) -> None:
        self.scheduler.abort(item.sequence_id)
        self.seen["cancelled"] += 1

    def cancel(self) -> None:
        alive = [item for item in self.all.values() if item.status is not Status.FINISHED]
        if alive:
            self.give_up(self.rng.choice(alive))

    def sent(self) -> None:
        if self.shipped:
            ship = self.shipped.pop(self.rng.randrange(len(self.shipped)))
            self.scheduler.release([ship.block_id], ship.receiver)


def live(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += Life(seed).run()
        except Exception as error:
            raise AssertionError(f"life {seed}") from error
    kinds = ("prefill", "reserve", "add", "refused", "finished", "broken", "cancelled", "preempted", "swapped")
    assert all(seen[kind] > len(seeds) // 50 for kind in kinds), f"hardly tried: {seen}"


@pytest.mark.slow
def test_a_thousand_lives_leave_nothing_behind():
    live(range(1000))


@pytest.mark.slow
def test_ten_thousand_lives_leave_nothing_behind():
    live(range(10_000))
