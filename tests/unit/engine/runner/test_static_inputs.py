"""Static inputs and block tables hold what the steps say, whatever came before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.plan import PlannedSequence, SampleSpec
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.static_decode import StaticInputs, StaticTables
from shared.engine.sampling_params import SamplingParams

LINK = DeviceLink(torch.device("cpu"))
ROWS, WIDTH, PADDING = 6, 5, 99

tables = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=WIDTH).map(tuple), max_size=ROWS)


@given(steps=st.lists(st.tuples(tables, st.integers(0, ROWS)), max_size=8))
def test_the_rows_of_a_step_hold_its_tables_and_padding(steps):
    static = StaticTables(ROWS, WIDTH, PADDING, LINK)
    for block_tables, extra in steps:
        num_rows = min(ROWS, len(block_tables) + extra)
        static.fill(block_tables, num_rows)
        for row, table in enumerate(block_tables):
            assert tuple(static.tables[row, : len(table)].tolist()) == table
        for row in range(len(block_tables), num_rows):
            assert int(static.tables[row, 0]) == PADDING


def planned(token, end, pending=None, num_prompt=1, **params) -> PlannedSequence:
    spec = SampleSpec(SamplingParams(**{"seed": 3, **params}), end)
    return PlannedSequence("s", (token,), end - 1, (0,), num_prompt, (spec,), pending)


def test_a_row_says_how_its_token_is_found_and_the_next_is_chosen():
    inputs = StaticInputs(4, LINK)
    seed = 2**63 + 5
    inputs.fill(
        [planned(7, 12, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=seed), planned(0, 4, 1, 9, temperature=0)]
    )
    rows = inputs.rows()
    assert inputs.token_ids.tolist() == [7, 0, 0, 0]
    assert inputs.pending.tolist() == [-1, 1, -1, -1]
    assert inputs.seq_lens.tolist() == rows.positions.tolist() == [12, 4, 1, 1]
    assert rows.temperatures.tolist() == [0.5, 0.0, 0.0, 0.0]
    assert rows.top_ks.tolist() == [3, 0, 0, 0]
    assert rows.top_ps.tolist() == [0.9, 1.0, 1.0, 1.0]
    assert torch.equal(rows.min_ps, torch.tensor([0.1, 0.0, 0.0, 0.0]))
    assert [value % 2**64 for value in rows.seeds.tolist()] == [seed, 3, 0, 0]


def test_a_smaller_batch_leaves_nothing_of_the_one_before():
    inputs = StaticInputs(2, LINK)
    inputs.fill([planned(7, 12), planned(8, 3, 0)])
    inputs.fill([planned(5, 2)])
    assert inputs.token_ids.tolist() == [5, 0]
    assert inputs.pending.tolist() == [-1, -1]
    assert inputs.seq_lens.tolist() == [2, 1]
