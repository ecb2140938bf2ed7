"""The GPU engine's benchmark: its arithmetic, and that every part of it runs."""

from __future__ import annotations

import pytest
import torch

from loadtest.bench.engine.cuda import LLAMA_8B, EngineBench, Step
from loadtest.bench.kernels.limits import Limits
from shared.model.families.registry import parse_config
from shared.model.random_weights import random_decoder
from shared.model.weights.plan import Quantization

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
    weight_bytes, kv_bytes = 4 * bench.num_weights, 4 * 2 * 2 * 2 * 8  # a token's
    assert results[0].limit == pytest.approx(40 / ((weight_bytes + 40 * kv_bytes) / 4e12))
    assert results[1].limit == pytest.approx(3 / ((weight_bytes + 3 * 21 * kv_bytes) / 4e12))
    assert results[1].fraction == pytest.approx(results[1].value / results[1].limit)


def test_a_wide_batch_and_a_prompt_are_bound_by_their_products():
    config = parse_config(SMALL)
    steps = (Step(1, 0, 40), Step(3, 20, 1))
    slow = Limits("a device", bytes_per_s=4e12, flops_per_s=1e9)
    with torch.inference_mode():
        bench = EngineBench(random_decoder(config, torch.float32, "cpu", kernels="torch"), steps)
    layers, head = bench.num_weights - 101 * 32, 101 * 32
    attention = 4 * 2 * 4 * 8  # FLOPs of a pair of tokens, all layers and heads
    prompt_flops = 2 * layers * 40 + 2 * head + attention * 40 * 41 / 2
    assert bench.limit_s(steps[0], slow) == pytest.approx(prompt_flops / 1e9)
    assert bench.limit_s(steps[1], slow) == pytest.approx((2 * 3 * (layers + head) + attention * 3 * 21) / 1e9)


@pytest.mark.parametrize(("quantization", "element_bytes"), [("int8", 1.0), ("w8a8", 1.0), ("fp8", 1.0), ("int4", 0.5)])
def test_weights_in_fewer_bits_are_drawn_and_count_as_their_codes(quantization: Quantization, element_bytes: float):
    config = parse_config(SMALL)
    decoder = random_decoder(config, torch.float32, "cpu", kernels="torch", quantization=quantization)
    steps = (Step(1, 0, 40), Step(3, 20, 1))
    with torch.inference_mode():
        bench = EngineBench(decoder, steps)
        results = [result for step in steps for result in bench.measure(step, LIMITS, repeats=1)]
    head, layers = 101 * 32, bench.num_weights - 101 * 32
    assert head + element_bytes * layers < bench.weight_bytes < 1.5 * (head + element_bytes * layers)
    kv_bytes = 4 * 2 * 2 * 2 * 8
    assert results[1].limit == pytest.approx(3 / ((bench.weight_bytes + 3 * 21 * kv_bytes) / 4e12))
