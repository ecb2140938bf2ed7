"""64 greedy tokens, fp32, of groups over two hosts, whose ranks have TCP alone between them: those of transformers; and
whole blocks, to and from them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shared.model.ranks.shard import Degrees
from tests.integration.engine.engine_run import EngineRun, hand_off
from tests.integration.engine.group_run import GroupRun
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.integration.engine.test_own_pools import PROMPT, write
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

CELLS = [("llama/2", Degrees(2, 2))]
"""Sums and stages both between hosts."""
REST = [
    ("llama/4", Degrees(1, 2)),
    ("llama/4", Degrees(4)),
    ("mixtral", Degrees(2, expert=2)),
    ("deepseek-v3", Degrees(2, 2, expert=2)),
]
"""Each way once, each family once."""


def over_hosts(folder: Path, degrees: Degrees, hosts: int = 2, **policy: Any) -> GroupRun:
    return GroupRun(folder, degrees, own_pools=True, hosts=hosts, **policy)


@pytest.mark.parametrize(
    ("name", "degrees"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in REST)], ids=str
)
def test_a_group_over_two_hosts_gives_the_tokens_of_transformers(tmp_path: Path, name: str, degrees: Degrees) -> None:
    folder = write(tmp_path / "model", name)
    expected = transformers_greedy(folder, PROMPT)
    with closing(over_hosts(folder, degrees)) as run:
        assert run.generate(PROMPT)[0] == expected
        assert run.generate(PROMPT)[0] == expected, "behind its own prefix"
        assert run.scheduler.counters.num_prefix_hit_tokens == 48
        run.pool.check_integrity()


@pytest.mark.slow
def test_four_hosts_of_one_rank_each_give_them_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama/2")
    with closing(over_hosts(folder, Degrees(2, 2), hosts=4)) as run:
        assert run.generate(PROMPT)[0] == transformers_greedy(folder, PROMPT)


@pytest.mark.parametrize("name", ["llama/4", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_blocks_pass_to_and_from_a_group_over_hosts_with_equal_bytes(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", name)
    expected = transformers_greedy(folder, PROMPT)
    with ExitStack() as stack:
        runs: list[EngineRun] = [
            stack.enter_context(closing(run))
            for run in (EngineRun(folder), over_hosts(folder, Degrees(1, 2)), GroupRun(folder, Degrees(2)))
        ]
        for prefill, decode in pairwise([*runs, *runs[:-1]]):
            prefill.pool.clear_cache()
            decode.pool.clear_cache()
            assert hand_off(prefill, decode, PROMPT) == expected
            decode.pool.check_integrity()
        sender = runs[1]
        sent = [bytes(sender.engine.blocks.outgoing(block_id)) for block_id in range(4)]
        assert {len(block) for block in sent} == {sender.layout.block_bytes}
        for receiver in (runs[0], runs[2]):
            arrived = [(block_id, receiver.engine.blocks.incoming(block_id)) for block_id in range(4)]
            for block, (_, memory) in zip(sent, arrived, strict=True):
                memoryview(memory)[:] = block
            receiver.pool.clear_cache()
            receiver.engine.blocks.store(arrived)
            assert receiver.runner.checksums(range(4)) == sender.runner.checksums(range(4))
            assert [bytes(receiver.engine.blocks.outgoing(block_id)) for block_id in range(4)] == sent
