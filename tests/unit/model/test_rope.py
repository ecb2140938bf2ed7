"""Rotary frequencies against transformers, at real models' sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.model.config.model_config import ModelConfig
from shared.model.families.registry import parse_config
from shared.model.layers.rope import Rotary

from .test_config import BASE

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 5e5,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 1e6,
    },
    "yarn attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 1e4,
        "attention_factor": 0.8,
        "beta_fast": 64.0,
        "beta_slow": 2.0,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 1e4,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
}
MAX_POSITIONS = 4096
SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": MAX_POSITIONS,
}


def _pair(rope: dict[str, Any]) -> tuple[ModelConfig, LlamaRotaryEmbedding]:
    ours = parse_config({**BASE, **SIZES, "rope_parameters": rope})
    return ours, LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=dict(rope)))


@pytest.mark.parametrize("name", CASES)
def test_cosines_and_sines_equal_transformers_at_all_positions(name: str) -> None:
    config, theirs = _pair(CASES[name])
    positions = torch.arange(MAX_POSITIONS)
    for dtype in (torch.float32, torch.bfloat16):
        rotary = Rotary(config, "cpu", dtype)
        cos, sin = rotary.cos_sin(positions, torch.full_like(positions, MAX_POSITIONS))
        expected = theirs(torch.empty(0, dtype=dtype), positions[None])
        assert cos.dtype == sin.dtype == dtype
        tolerance = 1e-3 if dtype == torch.float32 else 1e-2  # an ulp of the frequency, times 4096 radians
        torch.testing.assert_close((cos, sin), expected, rtol=0, atol=tolerance)


def test_dynamic_angles_depend_on_each_tokens_own_length() -> None:
    config, _ = _pair(CASES["dynamic"])
    rotary = Rotary(config, "cpu", torch.float32)
    assert rotary.needs_lengths
    lengths = [10, MAX_POSITIONS, MAX_POSITIONS + 1, 3 * MAX_POSITIONS]
    (cos,), (sin,) = rotary.cos_sin(torch.tensor([7, 7, 7, 7]), torch.tensor(lengths))
    assert torch.equal(cos[0], cos[1])
    assert not torch.equal(sin[1], sin[2])
    for row, length in enumerate(lengths):
        theirs = _pair(CASES["dynamic"])[1]
        expected, _ = theirs(torch.empty(0), torch.arange(length)[None])
        torch.testing.assert_close(cos[row], expected[0, 7], rtol=0, atol=1e-6)


def test_only_dynamic_positions_need_lengths() -> None:
    for name in CASES:
        assert Rotary(_pair(CASES[name])[0], "cpu", torch.float32).needs_lengths == (name == "dynamic")
