"""A model answers the same whatever instruction set its C++ kernels run with: all that this processor has, and the
emulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.model.decoder import Decoder
from tests.unit.kernels.isas import ISAS, every_isa, needs_library
from tests.unit.model.paged_run import load_oracle, oracle_logits, prompt_logits

from .families import EXPERTS, FAMILIES, OTHERS, write_family

pytestmark = needs_library

KERNELS = ("torch", *(f"cpu:{isa}" for isa in ISAS))
FP32_TOLERANCE = 1.5e-5
"""Of the largest logit: what two orders of fp32 sums leave."""
BF16_TOLERANCE = 1.1
"""Root mean square of the errors of logits over that of torch in bf16, which is 2.5 to 3.6 % of their deviation."""


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


def write_vector_sized(folder: Path, family: str) -> Path:
    """Sizes of whole vectors, so that all layers run in one call."""
    return write_family(folder, family, hidden_size=96, intermediate_size=160, num_heads=6, head_dim=32)


DENSE = [(write, family) for write in (write_family, write_vector_sized) for family in FAMILIES]
FIRST = [
    (write_vector_sized, "LlamaForCausalLM"),
    (write_vector_sized, "gemma2"),
    (write_family, "qwen3-moe"),
    (write_family, "deepseek-v3"),
]
STACKED = ("gemma2", "gemma3", "glm4")
"""Families whose layers are one call too, with more norms, other activations, bounds of scores, positions by layer."""
ALL = [
    pytest.param(write, family, marks=() if (write, family) in FIRST else pytest.mark.slow)
    for write, family in [
        *DENSE,
        *((write_family, family) for family in (*EXPERTS, *OTHERS)),
        *((write_vector_sized, family) for family in STACKED),
    ]
]


@pytest.mark.parametrize(("write", "family"), ALL)
def test_logits_in_fp32_are_those_of_transformers_with_all(tmp_path: Path, write, family) -> None:
    folder = write(tmp_path, family)
    prompt = prompts([75])[0]
    expected = oracle_logits(load_oracle(folder), prompt)
    limit = FP32_TOLERANCE * expected.abs().max()
    for kernels in KERNELS:
        decoder = Decoder.load(folder, torch.float32, "cpu", kernels=kernels)
        for chunk_len in (len(prompt), 16, 1):
            found = prompt_logits(decoder, prompt, chunk_len)
            assert (found - expected).abs().max() < limit, f"{kernels}, chunks of {chunk_len}"


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean().sqrt())


@pytest.mark.slow
@every_isa
@pytest.mark.parametrize(("write", "family"), DENSE)
def test_logits_in_bf16_are_as_exact_as_those_of_torch(tmp_path: Path, write, family, isa) -> None:
    folder = write(tmp_path, family)
    prompt = prompts([75])[0]

    def logits(kernels: str, dtype: torch.dtype) -> Tensor:
        return prompt_logits(Decoder.load(folder, dtype, "cpu", kernels=kernels), prompt, len(prompt)).float()

    exact = logits("torch", torch.float32)
    ours, theirs = (logits(kernels, torch.bfloat16) for kernels in (f"cpu:{isa}", "torch"))
    assert error(ours, exact) < BF16_TOLERANCE * error(theirs, exact)
