"""A small decoder run wholly with Triton's ops, interpreted: the tokens that torch's ops give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.kernels.sampling.rows import SamplingRows
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from tests.unit.model.paged_run import PagedSequence

from .conftest import Run

PROMPT = [(7 * i * i + 3) % 128 for i in range(18)]
NUM_TOKENS = 7


def greedy(folder: Path, kernels: str) -> tuple[list[int], torch.Tensor]:
    """Two chunks of prompt, then token by token; every choice by the backend's own sampling."""
    decoder = Decoder.load(folder, torch.float32, "cpu", kernels=kernels)
    assert decoder.kernels.name == kernels
    sequence = PagedSequence(decoder, len(PROMPT) + NUM_TOKENS)
    greedy_row = SamplingRows.from_lists([0.0], [0], [1.0], [0.0], [0], [0])
    sequence.step(PROMPT[:13], len(PROMPT))
    rows = [sequence.step(PROMPT[13:], len(PROMPT))[-1:]]
    tokens = decoder.kernels.sample_tokens(rows[-1], greedy_row).tolist()
    while len(tokens) < NUM_TOKENS:
        rows.append(sequence.step(tokens[-1:], sequence.kv_len + 1))
        tokens += decoder.kernels.sample_tokens(rows[-1], greedy_row).tolist()
    return tokens, torch.cat(rows)


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ],
)
def test_two_layers_give_the_greedy_tokens_of_torch(
    interpreted: Run, tmp_path: Path, architecture: str, extra: dict[str, Any]
) -> None:
    write_random_checkpoint(
        tmp_path, architecture, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, extra_config=extra
    )
    tokens, logits = interpreted(greedy, tmp_path, "triton")
    expected_tokens, expected_logits = greedy(tmp_path, "torch")
    assert tokens == expected_tokens
    assert len(set(tokens)) > 2
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)
