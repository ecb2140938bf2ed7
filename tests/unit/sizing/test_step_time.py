"""The model of step times: its form, its fit, and files of it."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.sizing.measured_steps import measured
from shared.sizing.step_fit import (
    BALANCES,
    FEWEST_BETWEEN_FITS,
    KEPT_KINDS,
    MAX_KINDS,
    MIN_STEPS,
    MOST_BETWEEN_FITS,
    StepTimeFit,
    fitted,
)
from shared.sizing.step_time import StepKinds, StepTimes, StepWork, chunk_pairs
from tests.examples import examples
from tests.unit.sizing.steps import drawn_works, step_times, works


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


TRUTH = StepTimes(
    fixed_s=3e-3, read_s=16 * 0.4e-3, token_s=0.4e-3, sequence_s=0.15e-3, kv_s=0.75e-6, attention_s=0.12e-6, overlap=0.8
)


def learnt(steps: list[tuple[StepWork, float]], fit: StepTimeFit | None = None) -> StepTimeFit:
    fit = fit or StepTimeFit()
    for work, seconds in steps:
        fit.observe(work, seconds)
    return fit


def errors(times: StepTimes, truth: StepTimes, count: int = 200) -> list[float]:
    """Relative, in order, over steps that the fit has not seen."""
    unseen = drawn_works(Random(99), count)
    return sorted(abs(times.step_s(work) / truth.step_s(work) - 1) for work in unseen)


@pytest.mark.parametrize("balance", BALANCES[2:7])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_coefficients_are_found_again(balance, overlap):
    truth = replace(TRUTH, read_s=balance * TRUTH.token_s, overlap=overlap)
    rng = Random(balance)
    steps = drawn_works(rng, 60) + [StepWork(batch, 64 * batch) for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    found = fitted(steps, [truth.step_s(work) for work in steps])
    assert errors(found, truth)[-1] < 0.02
    for name in ("token_s", "kv_s", "attention_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05)
    if overlap:
        assert found.read_s == pytest.approx(truth.read_s, rel=0.05)
        assert found.overlap == pytest.approx(overlap, abs=0.1)


@pytest.mark.parametrize("balance", [90, 140, 177, 300])
def test_a_balance_between_those_tried_first_is_found_from_steps_that_all_take_the_target(balance):
    """As a worker sees them that bounds its steps by time: what one number of the work gains, another one loses."""
    truth = StepTimes(0.5e-3, balance * 34e-6, 34e-6, 0.0, 50e-9, 1.1e-9, overlap=1.0)
    rng, fit = Random(balance), StepTimeFit()
    for index in range(1500):
        decoding = StepWork(batch := rng.randint(1, 20 if index < 300 else 80), batch * rng.randint(300, 1500))
        chunk = rng.choice((0, truth.largest_chunk(decoding, before := rng.randint(0, 1000), 0.012, 2048)))
        work = decoding.with_chunk(chunk, before) if chunk else decoding
        fit.observe(work, truth.step_s(work) * rng.gauss(1.0, 0.03))
        assert fit.times is not None or index < MIN_STEPS
    assert fit.times.prompt_s(2048) == pytest.approx(truth.prompt_s(2048), rel=0.08)
    assert fit.times.token_s == pytest.approx(truth.token_s, rel=0.08)
    assert fit.times.decode_step_s(60, 60_000) == pytest.approx(truth.decode_step_s(60, 60_000), rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_prompts_whose_products_hide_behind_the_reading_are_not_taken_for_free(seed):
    """A slow card's first steps: hardly one has as many tokens as take as long as reading the weights, 316."""
    truth = StepTimes(0.5e-3, 23.3e-3, 74e-6, 0.0, 190e-9, 2.4e-9, overlap=1.0)
    rng, fit = Random(seed), StepTimeFit()
    for _ in range(150):
        batch = rng.choice((0, 1, 1, 2, 2, 3))
        work = StepWork(batch, batch * rng.randint(100, 400))
        if not batch or rng.random() < 0.4:
            work = work.with_chunk(rng.choice((16, rng.randint(100, 300))), 0)
        if rng.random() < 0.05:
            work = work.with_chunk(rng.randint(100, 300), 0)
        fit.observe(work, truth.step_s(work) * rng.gauss(1.0, 0.03))
        assert fit.times is not None or fit.num_steps < MIN_STEPS
    prompts = StepWork(0, 0, 4000, 20 * chunk_pairs(200, 0), 20)
    assert fit.times.step_s(prompts) == pytest.approx(truth.step_s(prompts), rel=0.4)


@given(st.floats(1e-3, 1.0), st.lists(st.integers(1, 64), min_size=20, max_size=200))
def test_no_balance_beyond_the_steps_that_were_seen_is_believed(seconds, batches):
    fit = StepTimeFit()
    for batch in batches * 20:
        fit.observe(StepWork(batch, 300 * batch), seconds)
        assert fit.times is not None or fit.num_steps < MIN_STEPS
    assert fit.times.read_s <= 1.01 * BALANCES[-1] * fit.times.token_s


@given(step_times(), st.integers(0, 1000))
@examples(30)
def test_noise_of_a_tenth_leaves_most_steps_predicted_within_a_tenth(truth, seed):
    """Where one term is all of a step and lies between two balances that are tried, a few are a fifth off."""
    rng = Random(seed)
    steps = [(work, truth.step_s(work) * rng.uniform(0.9, 1.1)) for work in drawn_works(rng, 400)]
    found = learnt(steps).times
    assert found is not None
    wrong = errors(found, truth)
    assert wrong[len(wrong) // 2] < 0.10
    assert wrong[int(0.9 * len(wrong))] < 0.25


@given(st.lists(st.tuples(works(), st.floats(1e-6, 100)), max_size=60), step_times() | st.none())
@examples(60)
def test_no_coefficient_is_negative_whatever_was_measured(steps, prior):
    times = learnt(steps, StepTimeFit(prior)).times
    if times is None:
        assert prior is None
        return
    found = (times.fixed_s, times.read_s, times.token_s, times.sequence_s, times.kv_s, times.attention_s)
    assert all(value >= 0 and math.isfinite(value) for value in found)
    assert 0 <= times.overlap <= 1
    assert all(times.step_s(work) >= 0 for work, _ in steps)


@given(st.lists(works(), min_size=MIN_STEPS, max_size=60))
def test_the_fit_says_how_many_kinds_of_answers_and_of_chunks_it_rests_on(drawn):
    fit = learnt([(work, 1.0) for work in drawn])
    assert fit.kinds == StepKinds()  # nothing is fitted before it is asked for
    counted = [work for work in drawn if work.num_tokens]
    if fit.times is None:
        assert len(counted) < MIN_STEPS
        return
    batches = {(work.num_sequences.bit_length(), work.num_context_tokens.bit_length()) for work in counted}
    chunks = {(work.num_chunk_tokens.bit_length(), work.num_chunk_pairs.bit_length()) for work in counted}
    found = {batch for batch in batches if batch[0]}
    assert fit.kinds.num_chunks == len({chunk for chunk in chunks if chunk[0]})
    assert fit.kinds.num_batches == (len(found) if len({size for size, _ in found}) > 1 else min(1, len(found)))


def test_steps_that_do_both_are_predicted_from_those_that_do_one():
    alone = [work for work in drawn_works(Random(3), 400) if not (work.num_sequences and work.num_chunks)]
    found = learnt([(work, TRUTH.step_s(work)) for work in alone]).times
    assert found is not None
    both = [work for work in drawn_works(Random(4), 200) if work.num_sequences and work.num_chunks]
    assert max(abs(found.step_s(work) / TRUTH.step_s(work) - 1) for work in both) < 0.1


def test_a_busy_machine_in_every_fifth_step_changes_little():
    rng = Random(5)
    works = drawn_works(rng, 600)
    steps = [(work, TRUTH.step_s(work) * (rng.uniform(1.5, 20) if rng.random() < 0.2 else 1.0)) for work in works]
    found = learnt(steps).times
    assert found is not None
    wrong = errors(found, TRUTH)
    assert wrong[len(wrong) // 2] < 0.05
    assert wrong[int(0.9 * len(wrong))] < 0.15


def test_a_machine_that_became_slower_is_believed_soon():
    decode = StepWork(8, 4096)
    fit = learnt([(work, TRUTH.step_s(work)) for work in drawn_works(Random(6), 300)])
    fit = learnt([(decode, 3 * TRUTH.step_s(decode))] * (2 * MOST_BETWEEN_FITS), fit)
    assert fit.times is not None
    before = TRUTH.step_s(decode)
    assert fit.times.step_s(decode) > 1.5 * before
    slower = [(work, 3 * TRUTH.step_s(work)) for work in drawn_works(Random(7), 800)]
    fit = learnt(slower, fit)
    wrong = errors(fit.times, replace(
        TRUTH, fixed_s=3 * TRUTH.fixed_s, read_s=3 * TRUTH.read_s, token_s=3 * TRUTH.token_s,
        sequence_s=3 * TRUTH.sequence_s, kv_s=3 * TRUTH.kv_s, attention_s=3 * TRUTH.attention_s,
    ))  # fmt: skip
    assert wrong[int(0.9 * len(wrong))] < 0.1


def test_a_day_of_decode_steps_does_not_push_out_what_prompts_showed():
    prompt = StepWork().with_chunk(512, 0)
    fit = learnt([(work, TRUTH.step_s(work)) for work in drawn_works(Random(8), 200)])
    fit = learnt([(StepWork(n % 32 + 1, 600 * (n % 32 + 1)), TRUTH.decode_step_s(n % 32 + 1, 600 * (n % 32 + 1)))
                  for n in range(20_000)], fit)  # fmt: skip
    assert fit.times is not None
    assert fit.times.step_s(prompt) == pytest.approx(TRUTH.step_s(prompt), rel=0.05)


@pytest.mark.parametrize("is_chunks_first", [True, False])
def test_many_kinds_of_one_part_do_not_push_out_those_of_the_other(is_chunks_first):
    """Powers of two, so that each step is a kind of its own."""
    chunks = [StepWork(0, 0, 1 << size, 1 << pairs, 1) for size in range(12) for pairs in range(size, size + 12)]
    batches = [StepWork(1 << size, 1 << context) for size in range(12) for context in range(size, size + 12)]
    first, later = (chunks, batches) if is_chunks_first else (batches, chunks)
    fit = learnt([(work, TRUTH.step_s(work)) for work in first + later * 4])
    assert fit.times is not None
    assert fit.num_fitted > len(first) + 2 * len(later)
    assert len(fit._kinds) == MAX_KINDS
    kept, newer = reversed(fit.kinds) if is_chunks_first else fit.kinds
    assert KEPT_KINDS <= kept <= KEPT_KINDS + 1
    assert newer == MAX_KINDS - kept


def test_before_anything_was_measured_the_prior_counts_and_then_where_nothing_was():
    assert StepTimeFit().times is None
    prior = StepTimes(1e-3, 2e-3, 1e-4, 0.0, 1e-6, 1e-7)
    assert StepTimeFit(prior).times == prior
    decode = StepWork(4, 1024)
    found = learnt([(decode, prior.step_s(decode))] * MIN_STEPS, StepTimeFit(prior)).times
    assert found is not None
    prompt = StepWork().with_chunk(512, 0)
    assert found.step_s(prompt) == pytest.approx(prior.step_s(prompt), rel=0.1)


def test_without_a_prior_one_kind_of_step_gives_a_guess_of_the_same_scale_for_others():
    for scale in (1e-4, 1.0):
        found = learnt([(StepWork(1, 100), scale)] * MIN_STEPS).times
        assert found is not None
        assert found.step_s(StepWork(1, 100)) == pytest.approx(scale, rel=0.05)
        assert scale <= found.step_s(StepWork().with_chunk(64, 0)) < 100 * scale


def test_steps_without_tokens_or_without_a_time_say_nothing():
    fit = learnt([(StepWork(), 1.0), (StepWork(1, 5), 0.0), (StepWork(1, 5), math.inf), (StepWork(1, 5), math.nan)])
    assert fit.num_steps == 0


def test_what_is_kept_and_how_often_it_is_fitted_is_bounded(monkeypatch):
    fits = []
    fit = StepTimeFit()
    whole = fit._fit
    monkeypatch.setattr(fit, "_fit", lambda: (fits.append(fit.num_steps), whole()))
    rng = Random(9)
    for _ in range(1500):
        tokens = 1 << rng.randint(0, 12)
        before = 1 << rng.randint(0, 14)
        work = StepWork(1 << rng.randint(0, 7), 1 << rng.randint(4, 18), tokens, chunk_pairs(tokens, before), 1)
        fit.observe(work, TRUTH.step_s(work))
        assert fit.times is not None or fit.num_steps < MIN_STEPS
    assert len(fit._kinds) == MAX_KINDS
    assert len(fits) <= 1500 / FEWEST_BETWEEN_FITS
    fits.clear()
    for _ in range(500):
        assert learnt([(StepWork(8, 4096), 0.01)], fit).times is not None
    assert len(fits) <= 2 + 500 / MOST_BETWEEN_FITS


TIMES = {"fixed_s": 1e-3, "read_s": 2e-3, "token_s": 1e-5, "sequence_s": 0.0, "kv_s": 1e-8, "attention_s": 1e-9}


def test_coefficients_are_taken_as_they_stand(tmp_path):
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"step_times": {**TIMES, "overlap": 0.5}}))
    assert measured(file) == StepTimes(**TIMES, overlap=0.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "{}",
        '{"step_times": 3}',
        json.dumps({"step_times": {"fixed_s": 1.0}}),
        json.dumps({"step_times": {**TIMES, "warp_s": 1.0}}),
        json.dumps({"step_times": {**TIMES, "kv_s": -1.0}}),
        json.dumps({"step_times": {**TIMES, "kv_s": "fast"}}),
        json.dumps({"step_times": {**TIMES, "read_s": float("inf")}}),
        json.dumps({"step_times": {**TIMES, "overlap": 1.5}}),
        json.dumps({"results": [{"name": "prefill 512", "value": 1000.0}]}),
    ],
)
def test_a_file_without_step_times_is_refused(tmp_path, text):
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(ConfigError):
        measured(file)
