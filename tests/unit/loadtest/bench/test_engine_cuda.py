"""The GPU engine's benchmark: its arithmetic, and that every part of it runs."""

from __future__ import annotations

import pytest
import torch

from loadtest.bench.engine.cuda import LLAMA_8B, EngineBench, Step
from loadtest.bench.kernels.limits import Limits
from shared.model.families.registry import parse_config
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
        bench = EngineBench(random_decoder(parse_config(SMALL), torch.float32, "cpu", kernels="torch"), steps)
        results = [result for step in steps for result in bench.measure(step, LIMITS, repeats=2)]
    assert [r.name for r in results] == ["prefill 40", "decode 3 at 20", "decode 3 at 20, host time"]
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64
    assert bench.num_weights == 2 * layer + 101 * 32
    flops = 2 * 2 * layer * 40 + 2 * 101 * 32 + 2 * 2 * 4 * 8 * 40**2
    assert results[0].limit == pytest.approx(40 / (flops / 8e14))
    num_bytes = 4 * bench.num_weights + 3 * 20 * 4 * 2 * 2 * 2 * 8
    assert results[1].limit == pytest.approx(3 / (num_bytes / 4e12))
    assert results[1].fraction == pytest.approx(results[1].value / results[1].limit)
