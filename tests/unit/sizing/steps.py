"""Steps and coefficients of any magnitude, for properties."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from shared.sizing.step_time import StepTimes, StepWork


@st.composite
def step_times(draw: st.DrawFn) -> StepTimes:
    """Coefficients from a tiny model on a GPU to a large one on a processor, on one rank."""
    return StepTimes(
        fixed_s=draw(st.floats(1e-5, 1e-2)),
        read_s=draw(st.floats(1e-4, 0.2)),
        token_s=draw(st.floats(1e-6, 1e-2)),
        sequence_s=draw(st.floats(0, 1e-3)),
        kv_s=draw(st.floats(0, 1e-5)),
        attention_s=draw(st.floats(0, 1e-6)),
        overlap=draw(st.floats(0, 1)),
    )


@st.composite
def works(draw: st.DrawFn) -> StepWork:
    """Steps that decode, compute chunks, or do both."""
    work = StepWork(draw(st.integers(0, 64)), draw(st.integers(0, 100_000)))
    for _ in range(draw(st.integers(0, 3))):
        work = work.with_chunk(draw(st.integers(1, 2048)), draw(st.integers(0, 4096)))
    return work


def drawn_works(rng: Random, count: int) -> list[StepWork]:
    """Steps as an engine has them: half decode, a quarter compute a chunk, a quarter do both."""
    found = []
    for index in range(count):
        work = StepWork()
        if index % 4 != 0:
            batch = rng.randint(1, 64)
            work = StepWork(batch, batch * rng.randint(16, 4096))
        if index % 4 < 2:
            work = work.with_chunk(rng.choice((16, 64, 200, 512, 2048)), rng.choice((0, 0, 512, 2048)))
        found.append(work)
    return found
