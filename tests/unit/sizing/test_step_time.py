"""The form of a step's time: inequalities that hold for any coefficients, and the largest chunk by it."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sizing.step_time import StepTimes, StepWork, chunk_pairs
from tests.unit.sizing.steps import step_times, works


@given(step_times(), works(), st.integers(0, 4), st.integers(1, 1000))
def test_a_step_takes_no_less_with_more_of_anything_and_never_less_than_nothing(times, work, field, more):
    longer = work._replace(**{StepWork._fields[field]: work[field] + more})
    assert 0 <= times.step_s(work) <= times.step_s(longer) * (1 + 1e-12)


@given(step_times(), works())
def test_a_step_that_does_both_takes_no_more_than_two_steps_and_no_less_than_either(times, work):
    decodes = StepWork(work.num_sequences, work.num_context_tokens)
    chunks = work._replace(num_sequences=0, num_context_tokens=0)
    both, apart = times.step_s(work), (times.step_s(decodes), times.step_s(chunks))
    assert max(apart) * (1 - 1e-12) <= both <= sum(apart) * (1 + 1e-12)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_pairs_do_not_depend_on_how_a_prompt_is_cut(first, second, before):
    assert chunk_pairs(first, before) + chunk_pairs(second, before + first) == chunk_pairs(first + second, before)
    assert chunk_pairs(1, before) == before + 1


@given(step_times(), works(), st.integers(0, 5000), st.floats(0, 3), st.integers(0, 3000))
def test_the_largest_chunk_keeps_the_time_and_one_token_more_does_not(times, work, before, within_s, most):
    chunk = times.largest_chunk(work, before, within_s, most)
    assert 0 <= chunk <= most
    if chunk:
        assert times.step_s(work.with_chunk(chunk, before)) <= within_s
    if chunk < most:
        assert times.step_s(work.with_chunk(chunk + 1, before)) > within_s


def test_overlap_hides_the_shorter_one_of_reading_and_products():
    apart, hidden = (StepTimes(1.0, 8.0, 0.5, 0.0, 0.0, 0.0, overlap) for overlap in (0.0, 1.0))
    assert [apart.decode_step_s(batch, 0) for batch in (4, 16, 32)] == pytest.approx([11, 17, 25])
    assert [hidden.decode_step_s(batch, 0) for batch in (4, 16, 32)] == pytest.approx([9, 9, 17])


def test_every_coefficient_has_its_part():
    times = StepTimes(1.0, 2.0, 10.0, 100.0, 1000.0, 10_000.0, overlap=0.0)
    assert times.step_s(StepWork(3, 5, 7, 11, 1)) == 1 + 2 + 10 * 10 + 3 * 100 + 5 * 1000 + 11 * 10_000
    assert {field.name for field in fields(times)} >= {"fixed_s", "read_s", "token_s", "sequence_s", "kv_s"}
