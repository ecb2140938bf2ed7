"""A receiver that takes nothing holds up its own prompts, not those of others."""

from __future__ import annotations

from shared.engine.plan import SampledToken, StepResult
from shared.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from shared.engine.sequence import Goal
from shared.kv.pool import BlockPool
from tests.unit.engine.builders import sequence

BLOCK = 4
NUM_BLOCKS = 40


def prompt(name: str, receiver: bytes):
    token = 2 + sum(map(ord, name)) % 1000
    return sequence(name, [token] * 16, goal=Goal.FIRST_TOKEN, ship_blocks=frozenset(range(4)), receiver=receiver)


def run(s, *, stalled: bytes, most: int = 200):
    """Steps until nothing more is planned; what is for `stalled` stays with the shipper. Returns (order, unsent)."""
    done, unsent = [], []
    for _ in range(most):
        plan = s.schedule()
        if plan.is_empty:
            break
        count = sum(len(item.samples) for item in plan.sequences)
        outcome = s.apply(plan, StepResult((SampledToken(9),) * count))
        done += [token.sequence_id for token in outcome.tokens]
        for ship in outcome.blocks:
            if ship.receiver == stalled:
                unsent.append(ship)
            else:
                s.release([ship.block_id], ship.receiver)
    return done, unsent


def test_prompts_for_others_go_on_while_one_receiver_takes_nothing():
    s = Scheduler(BlockPool(NUM_BLOCKS, BLOCK), SchedulerConfig(4, 16, max_unsent_share=0.25))
    for i in range(12):
        s.add(prompt(f"slow{i}", b"slow"))
        s.add(prompt(f"fast{i}", b"fast"))
    done, unsent = run(s, stalled=b"slow")
    assert [name for name in done if name.startswith("fast")] == [f"fast{i}" for i in range(12)]
    # More than 10 blocks stop it: the third prompt's pass that, and none starts behind it.
    assert [name for name in done if name.startswith("slow")] == ["slow0", "slow1", "slow2"]
    assert s.pool.num_used == len(unsent) == 12
    assert s.has_work
    for ship in unsent[:2]:
        s.release([ship.block_id], ship.receiver)
    again, more = run(s, stalled=b"slow")
    assert again == ["slow3"]
    for ship in (*unsent[2:], *more):
        s.release([ship.block_id], ship.receiver)
    assert run(s, stalled=b"")[0] == [f"slow{i}" for i in range(4, 12)]
    s.check_integrity()
    assert s.pool.num_used == 0
