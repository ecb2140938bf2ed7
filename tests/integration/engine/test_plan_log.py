"""What a recording holds, and what becomes of one that is damaged."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from shared.engine.plan import PlannedSequence, SampledToken, SampleSpec, StepPlan, StepResult
from shared.engine.sampling_params import SamplingParams
from shared.errors import TransferFailed
from tests.integration.engine.plan_log import RecordingRunner, ReplayedStep, replay


class FakeRunner:
    """Samples the number of the step, plus `offset`."""

    is_async = True
    blocks = None

    def __init__(self, offset: int = 0) -> None:
        self._next = offset

    def launch(self, plan: StepPlan):
        token, self._next = self._next, self._next + 1
        return SimpleNamespace(result=lambda: StepResult((SampledToken(token),)))

    def checksums(self, block_ids: list[int]) -> list[int]:
        return block_ids


def plan(start: int) -> StepPlan:
    return StepPlan((PlannedSequence("a", (0,), start, (3,), 1, SampleSpec(SamplingParams(), start + 1)),))


def recorded() -> bytes:
    """Two steps, the second launched before the first one's result was taken."""
    file = io.BytesIO()
    runner = RecordingRunner(FakeRunner(), file)
    first, second = runner.launch(plan(1)), runner.launch(plan(2))
    assert (first.result(), second.result()) == (StepResult((SampledToken(0),)), StepResult((SampledToken(1),)))
    return file.getvalue()


def test_steps_are_repeated_in_their_order_beside_what_was_recorded():
    steps = list(replay(FakeRunner(offset=5), io.BytesIO(recorded())))
    assert steps == [
        ReplayedStep(plan(1), StepResult((SampledToken(0),)), StepResult((SampledToken(5),))),
        ReplayedStep(plan(2), StepResult((SampledToken(1),)), StepResult((SampledToken(6),))),
    ]


def test_a_recording_that_was_cut_off_ends_with_its_last_whole_result():
    data = recorded()
    assert [len(list(replay(FakeRunner(), io.BytesIO(data[:end])))) for end in (0, len(data) - 1)] == [0, 1]


def test_what_is_no_recording_is_refused():
    with pytest.raises(TransferFailed, match="record of kind b'x'"):
        list(replay(FakeRunner(), io.BytesIO(b"xxxxxxxxx")))
    with pytest.raises(TransferFailed, match="a result before its plan"):
        list(replay(FakeRunner(), io.BytesIO(b"R\0\0\0\0")))
