"""Windows need blocks at two places at once when a sequence comes back: too few of them cost time, and end nothing."""

from __future__ import annotations

from random import Random

from shared.engine.plan import SampledToken, StepPlan, StepResult
from shared.engine.scheduler.host_swap import HostSwap
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import EngineSequence
from shared.kv.groups import KVGroups
from shared.kv.pool import BlockPool
from tests.unit.engine.builders import sequence

BLOCK = 4


def swapped(pool: BlockPool, swap: HostSwap, num_blocks: int) -> EngineSequence:
    """A sequence whose `num_blocks` whole blocks were moved to host memory."""
    found = sequence("a", list(range(2, 2 + BLOCK * num_blocks)))
    found.block_ids = pool.allocate(num_blocks)
    found.num_computed_tokens = BLOCK * num_blocks
    assert swap.move_out(found)
    pool.release(found.block_ids)
    found.block_ids = []
    return found


def test_what_was_moved_out_comes_back_where_there_is_room_and_else_the_prefix_counts_alone() -> None:
    for num_left in (4, 3):
        pool = BlockPool(8, BLOCK)
        swap = HostSwap(pool, 8, 1)
        item = swapped(pool, swap, 6)
        item.block_ids = pool.allocate(2)  # a prefix that is in the pool
        pool.allocate(pool.num_free - num_left)
        assert swap.move_in(item) == (24 if num_left == 4 else 8)
        assert len(item.block_ids) == (6 if num_left == 4 else 2)
        assert swap.num_used == 0
        assert item.host_slots == []


def run(scheduler: Scheduler, tokens: Random) -> StepPlan:
    plan = scheduler.schedule()
    count = sum(len(item.samples) for item in plan.sequences)
    scheduler.apply(plan, StepResult(tuple(SampledToken(tokens.randrange(2, 99)) for _ in range(count))))
    scheduler.check_integrity()
    return plan


def test_sequences_with_windows_that_are_swapped_come_to_their_ends_in_any_pool() -> None:
    """Prefixes are shared, windows are longer than a step."""
    groups = KVGroups(BLOCK, (None, 16))
    num_preempted = 0
    for seed in range(60):
        rng = Random(seed)
        pool = BlockPool(2 * rng.randint(14, 24), BLOCK)
        scheduler = Scheduler(pool, SchedulerConfig(4, 4, num_host_blocks=200), groups=groups)
        prefix = [rng.randrange(2, 99) for _ in range(24)]
        for number in range(5):
            tokens = prefix[: rng.choice([8, 20, 24])] + [100 + number] * rng.randint(1, 6)
            scheduler.add(sequence(f"s{number}", tokens, max_tokens=rng.randint(2, 20)))
        for _ in range(2000):
            if not scheduler.has_work:
                break
            run(scheduler, rng)
        assert not scheduler.has_work
        num_preempted += scheduler.counters.num_preemptions
    assert num_preempted > 0
