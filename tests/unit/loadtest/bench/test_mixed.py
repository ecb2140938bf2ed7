"""The benchmark of mixed steps: what is planned, what is said of it, and that others read it."""

from __future__ import annotations

import pytest
import torch

from loadtest.bench.engine.cuda import LLAMA_8B
from loadtest.bench.engine.mixed import MixedStep, measure, mixed_steps, report
from loadtest.rig.results import write
from shared.engine.plan import step_work
from shared.model.families.registry import parse_config
from shared.model.random_weights import random_decoder
from shared.sizing.measured_steps import measured
from shared.sizing.step_time import StepTimes

STEPS = mixed_steps([512, 256], [1, 8, 32], [16, 64, 512])
TIMES = StepTimes(2e-3, 4e-3, 0.25e-3, 0.1e-3, 1e-6, 1e-7, overlap=0.9)
SMALL = {
    **LLAMA_8B, "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def test_a_step_is_counted_as_the_engine_counts_its_plan() -> None:
    for step in STEPS:
        assert step_work(step.plan(101)) == step.work
        blocks = [block for item in step.plan(101).sequences for block in item.block_ids]
        assert sorted(blocks) == list(range(step.num_blocks))
    assert {bool(step.num_decodes and step.chunk) for step in STEPS} == {True, False}


def test_times_of_the_models_form_are_predicted_and_read_again(tmp_path) -> None:
    found = report(STEPS, [TIMES.step_s(step.work) for step in STEPS])
    errors = [result.value for result in found if result.name.endswith("error")]
    assert len(errors) == 4
    assert max(errors) < 5.0
    write(tmp_path / "steps.json", found)
    times = measured(tmp_path / "steps.json")
    for step in STEPS:
        assert times.step_s(step.work) == pytest.approx(TIMES.step_s(step.work), rel=0.03)


def test_steps_are_measured_by_the_engines_runner() -> None:
    torch.manual_seed(0)
    steps = [MixedStep(3, 20, 7), MixedStep(0, 0, 20, 5), MixedStep(2, 16, 0)]
    with torch.inference_mode():
        seconds = measure(random_decoder(parse_config(SMALL), torch.float32, "cpu", kernels="torch"), steps, 1)
    assert min(seconds) > 0
