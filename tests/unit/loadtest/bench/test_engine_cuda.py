"""The GPU engine's benchmark: its arithmetic, and that every part of it runs."""

from __future__ import annotations

import pytest
import torch

from loadtest.bench.engine.cuda import LLAMA_8B, STEPS, EngineBench, Step, fitting, verdicts
from loadtest.bench.kernels.limits import Limits
from loadtest.rig.results import Result
from shared.model.config.model_config import ModelConfig
from shared.model.random_weights import random_decoder

LIMITS = Limits("a device", bytes_per_s=4e12, flops_per_s=8e14)
SMALL = {
    **LLAMA_8B, "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def test_steps_run_and_their_limits_are_the_bytes_or_flops_that_they_need():
    torch.manual_seed(0)
    steps = (Step(1, 0, 40), Step(3, 20, 1))
    with torch.inference_mode():
        bench = EngineBench(random_decoder(ModelConfig.parse(SMALL), torch.float32, "cpu", kernels="torch"), steps)
        results = [result for step in steps for result in bench.measure(step, LIMITS, repeats=2)]
    assert [r.name for r in results] == ["prefill 40", "decode 3 at 20", "decode 3 at 20, host time"]
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64
    assert bench.num_weights == 2 * layer + 101 * 32
    flops = 2 * 2 * layer * 40 + 2 * 101 * 32 + 2 * 2 * 4 * 8 * 40**2
    assert results[0].limit == pytest.approx(40 / (flops / 8e14))
    num_bytes = 4 * bench.num_weights + 3 * 20 * 4 * 2 * 2 * 2 * 8
    assert results[1].limit == pytest.approx(3 / (num_bytes / 4e12))
    assert results[1].fraction == pytest.approx(results[1].value / results[1].limit)


def test_goals_are_judged_where_they_were_measured():
    results = [
        Result("prefill 8192", 1.0, "tok/s", 2.0, 0.5),
        Result("decode 32 at 256, host time", 12.0, "% of the step"),
        Result("decode 64 at 2048", 1.0, "tok/s", 1.2, 0.82),
    ]
    assert [line.partition(": ")[0] for line in verdicts(STEPS, results)] == ["missed", "met", "missed"]
    assert verdicts(STEPS, []) == []


def test_steps_are_left_out_where_their_kv_does_not_fit_and_the_report_says_so(capsys: pytest.CaptureFixture[str]):
    num_blocks = 31_000  # of 2 MiB: 60 GiB, what 80 GiB leave beside 15 GiB of weights
    kept = fitting(STEPS, num_blocks)
    assert [step.name for step in STEPS if step not in kept] == ["decode 256 at 2048"]
    assert max(step.batch * step.num_blocks for step in kept) <= num_blocks
    assert "decode 256 at 2048 is left out: its KV of 33024 blocks" in capsys.readouterr().out
    assert fitting(STEPS, 1 << 20) == list(STEPS)
