"""Where a sequence is by its status, and what the table's own check notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared.engine.scheduler.sequence_table import SequenceTable
from shared.engine.sequence import Status
from tests.unit.engine.builders import sequence

BLOCK_SIZE = 4


@pytest.fixture
def table() -> SequenceTable:
    """`w` waits, `r` and `s` run, `t` receives."""
    made = SequenceTable()
    for name in "rsw":
        made.add(sequence(name, [2, 3, 4, 5, 6]), 1.0)
    made.add(sequence("t", [2, 3, 4, 5, 6]), 1.0, receiving=True)
    for name in "rs":
        made[name].block_ids = [1, 2]
        made.run(made[name])
    made["t"].block_ids = [5, 6]
    made.check(BLOCK_SIZE)
    return made


def test_queued_tokens_are_those_of_prompts_not_the_next_ones(table: SequenceTable) -> None:
    assert table.work.num_queued_tokens == 15
    table["w"].num_computed_tokens = 4
    table["w"].host_slots = [0]
    assert table.work.num_queued_tokens == 15 - (5 - table["w"].num_uncomputed_tokens) - table["w"].num_host_tokens
    table["r"].num_computed_tokens = 4  # one token left: it decodes
    assert table.work.num_queued_tokens == 5 + table["w"].num_uncomputed_tokens - table["w"].num_host_tokens
    table["s"].num_computed_tokens = 3
    assert table.work.num_queued_tokens == 2 + table["w"].num_uncomputed_tokens - table["w"].num_host_tokens


def test_running_ones_stand_by_arrival_and_preempted_ones_before_the_rest(table: SequenceTable) -> None:
    assert [each.sequence_id for each in table.running] == ["r", "s"]
    for name in ("w", "t"):
        table[name].block_ids = [7, 8]
    table.run(table["t"])
    table.run(table["w"])
    assert [each.sequence_id for each in table.running] == ["r", "s", "w", "t"]
    for name in ("s", "r"):
        table[name].block_ids = []
        table.preempt(table[name])
    assert [each.sequence_id for each in table.waiting] == ["r", "s"]
    assert [each.sequence_id for each in table.holders] == ["w", "t"]
    table.check(BLOCK_SIZE)


def test_one_that_ended_is_nowhere(table: SequenceTable) -> None:
    for name in "wrst":
        item = table[name]
        table.end(item)
        assert item.status is Status.FINISHED
        assert table.get(name) is None
    assert (len(table), list(table.waiting), table.running, table.receiving) == (0, [], [], {})


def test_an_id_is_known_once(table: SequenceTable) -> None:
    with pytest.raises(AssertionError, match="r is known already"):
        table.add(sequence("r", [2]), 1.0)


def computed(name: str, count: int) -> Callable[[SequenceTable], None]:
    return lambda table: setattr(table[name], "num_computed_tokens", count)


BROKEN: dict[str, Callable[[SequenceTable], object]] = {
    "w waits but holds blocks": lambda table: table["w"].block_ids.append(9),
    "r holds blocks in both memories": lambda table: table["r"].host_slots.append(9),
    "t holds blocks in both memories": lambda table: table["t"].host_slots.append(9),
    "r: computed beyond its blocks": lambda table: (computed("r", 5)(table), table["r"].block_ids.pop()),
    "all in waiting wait": lambda table: table.waiting.append(table["r"]),
    "all in running run": lambda table: table.running.append(table["t"]),
    "all in receiving receive": lambda table: table.receiving.update(r=table["r"]),
    "assert": lambda table: table.running.reverse(),
    "assert len": lambda table: table.running.pop(),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_check_names_what_is_broken(table: SequenceTable, broken: str) -> None:
    BROKEN[broken](table)
    with pytest.raises(AssertionError, match=None if broken.startswith("assert") else broken):
        table.check(BLOCK_SIZE)


def test_a_sequence_may_have_computed_all_that_its_blocks_hold(table: SequenceTable) -> None:
    table["r"].block_ids.pop()
    computed("r", 4)(table)
    table.check(BLOCK_SIZE)
