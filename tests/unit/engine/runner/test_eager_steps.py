"""The inputs of a step are what its plan says, for few tokens and for many, and however steps follow each other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.plan import PlannedSequence, SampleSpec
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.eager_steps import EagerInputs
from shared.engine.sampling_params import SamplingParams

BLOCK_SIZE = 4
SPEC = SampleSpec(SamplingParams(seed=0, max_tokens=1), 9)


@st.composite
def steps(draw: st.DrawFn) -> list[PlannedSequence]:
    items = []
    for number in range(draw(st.integers(1, 5))):
        start, count = draw(st.integers(0, 20)), draw(st.sampled_from([1, 1, 3, 40]))
        tokens = tuple(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count)))
        table = tuple(draw(st.permutations(range(16))))[: -(-(start + count) // BLOCK_SIZE)]
        pending = draw(st.none() | st.integers(0, 7)) if count == 1 else None
        samples = (SPEC,) * draw(st.integers(0, min(3, count)))
        items.append(PlannedSequence(f"s{number}", tokens, start, table, draw(st.integers(1, 70)), samples, pending))
    return items


@given(st.lists(steps(), min_size=1, max_size=3))
def test_every_token_has_its_place(plans: list[list[PlannedSequence]]) -> None:
    inputs = EagerInputs(BLOCK_SIZE, DeviceLink(torch.device("cpu")), needs_lengths=True)
    for items in plans:
        found = inputs.of(items)
        expected = [(item, at) for item in items for at in range(item.start, item.end)]
        assert found.token_ids.tolist() == [item.token_ids[at - item.start] for item, at in expected]
        assert found.positions.tolist() == [at for _, at in expected]
        assert found.batch.slots.tolist() == [
            item.block_ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for item, at in expected
        ]
        assert found.batch.seq_lens.tolist() == [item.end for item in items]
        for row, item in enumerate(items):
            assert tuple(found.batch.block_tables[row, : len(item.block_ids)].tolist()) == item.block_ids
        assert found.rope_lengths is not None
        assert found.rope_lengths.tolist() == [max(item.num_prompt_tokens, at + 1) for item, at in expected]
        rows = {(item.sequence_id, at): row for row, (item, at) in enumerate(expected)}
        last = [rows[item.sequence_id, item.end - 1] for item in items]
        chosen = [row + 1 - n for row, item in zip(last, items, strict=True) for n in range(len(item.samples), 0, -1)]
        assert found.logit_rows.tolist() == chosen
        pending = [(row, item.pending) for row, item in zip(last, items, strict=True) if item.pending is not None]
        assert (found.pending is None) == (not pending)
        if found.pending is not None:
            assert list(zip(*(part.tolist() for part in found.pending), strict=True)) == pending
