"""The benchmark of steps in pieces: both ways are run, and an unlikely token is a difference."""

from __future__ import annotations

import torch

from loadtest.bench.engine.cuda import LLAMA_8B
from loadtest.bench.engine.mixed import MixedStep
from loadtest.bench.engine.piecewise import Pair
from shared.model.families.registry import parse_config
from shared.model.random_weights import random_decoder

SMALL = {
    **LLAMA_8B, "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def test_each_step_has_both_times_and_the_same_tokens() -> None:
    steps = (MixedStep(0, 0, 20), MixedStep(3, 20, 7))
    torch.manual_seed(0)
    with torch.inference_mode():
        pair = Pair(random_decoder(parse_config(SMALL), torch.float32, "cpu", kernels="torch"), steps)
        results = {result.name: result for step in steps for result in pair.measure(step, repeats=1)}
    mixed = "3 decodes and a chunk of 7"
    assert results[f"{mixed}, eager"].value > 0
    assert results[f"{mixed}, in pieces"].value > 0
    assert (results[f"{mixed}, same tokens"].value, results[f"{mixed}, same tokens"].limit) == (4, 4)
    assert results["chunk of 20, same tokens"].fraction == 1
