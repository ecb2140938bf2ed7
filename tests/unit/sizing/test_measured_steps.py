"""Step times from files: coefficients as they stand, and typed errors for files that hold none."""

from __future__ import annotations

import json

import pytest

from shared.errors import ConfigError
from shared.sizing.measured_steps import measured
from shared.sizing.step_time import StepTimes

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
