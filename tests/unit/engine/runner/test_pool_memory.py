"""How many blocks fit, and what is said where too few do."""

from __future__ import annotations

import pytest
import torch

from shared.engine.runner.pool_memory import MemoryBudget, allocate_pool, free_bytes, within_share
from shared.engine.runner.profile_run import largest_step
from shared.errors import ConfigError
from shared.kv.groups import KVGroups
from shared.kv.layout import BlockLayout, KVFormat

LAYOUT = BlockLayout(2, 16, KVFormat("float32", 2, 8))  # 4096 bytes a block
BUDGET = MemoryBudget(free_bytes=1_000_000, step_bytes=180_800, share=0.5)  # 100 blocks


def test_the_pool_gets_its_share_of_what_weights_and_steps_leave():
    assert LAYOUT.block_bytes == 4096
    assert BUDGET.choose(0, 10**9, LAYOUT) == 100
    assert BUDGET.choose(0, 40, LAYOUT) == 40
    assert BUDGET.choose(100, 10**9, LAYOUT) == 100
    assert BUDGET.choose(0, 10**9, LAYOUT, fewest=70) == 70
    with pytest.raises(ConfigError, match="room for 100, but another rank of the group has less"):
        BUDGET.choose(100, 10**9, LAYOUT, fewest=70)


@pytest.mark.parametrize(("budget", "wanted", "fitting"), [(BUDGET, 101, 100), (MemoryBudget(9, 99, 1.0), 0, 0)])
def test_a_pool_that_does_not_fit_is_refused_with_what_does(budget, wanted, fitting):
    with pytest.raises(
        ConfigError, match=rf"blocks of 4096 bytes do not fit, {fitting} do: .* max_num_batched_tokens"
    ) as refused:
        budget.choose(wanted, 10**9, LAYOUT)
    assert refused.value.details == {"field": "num_kv_blocks", "limit": fitting}


def test_memory_that_the_machine_does_not_have_is_refused_with_what_fits():
    with pytest.raises(ConfigError, match="KV blocks of 4096 bytes do not fit") as refused:
        allocate_pool(LAYOUT, 1 << 45, torch.device("cpu"))
    limit = refused.value.details["limit"]
    assert isinstance(limit, int)
    assert 0 < limit < 1 << 40


def test_a_pool_begins_as_zeros():
    pool = allocate_pool(LAYOUT, 3, torch.device("cpu"))
    assert tuple(pool.shape) == LAYOUT.shape(3)
    assert not pool.any()
    assert free_bytes(pool.device) > 0


@pytest.mark.parametrize(("num_seqs", "num_tokens", "max_len"), [(4, 64, 100), (64, 16, 100), (3, 50, 20), (1, 1, 1)])
def test_the_largest_step_reaches_both_limits(num_seqs, num_tokens, max_len):
    plan = largest_step(num_seqs, num_tokens, max_len, KVGroups(16))
    assert plan.num_tokens == min(num_tokens, max_len * num_seqs)
    assert len(plan.sequences) == min(num_seqs, num_tokens)
    blocks = [block for item in plan.sequences for block in item.block_ids]
    assert sorted(blocks) == list(range(len(blocks)))
    for item in plan.sequences:
        assert item.samples
        assert 1 <= item.end <= min(max_len, 16 * len(item.block_ids))


def test_a_share_of_a_device_is_of_the_whole_and_counts_what_the_process_holds() -> None:
    # 80 of memory, 15 of them weights: half of it leaves 25, unless a neighbour took more.
    assert within_share(free_bytes=65, total_bytes=80, used_bytes=15, share=0.5) == 25
    assert within_share(free_bytes=10, total_bytes=80, used_bytes=15, share=0.5) == 10
    assert within_share(free_bytes=65, total_bytes=80, used_bytes=15, share=0.1) == 0
