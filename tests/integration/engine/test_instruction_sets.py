"""A model answers the same whatever instruction set its C++ kernels run with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from tests.unit.kernels.isas import ISAS, every_isa, needs_library

from .engine_run import BLOCK_SIZE, EngineRun
from .families import FAMILIES, write_family

pytestmark = needs_library

BF16_TOLERANCE = 1.1
"""Root mean square of the errors of logits over that of torch in bf16, which is 2.5 to 3.6 % of their deviation."""


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


def write_vector_sized(folder: Path, architecture: str) -> Path:
    """Sizes of whole vectors, so that all layers run in one call."""
    write_random_checkpoint(folder, architecture, hidden_size=96, intermediate_size=160, num_heads=6, head_dim=32)
    return folder


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("write", [write_family, write_vector_sized])
def test_greedy_tokens_in_fp32_are_the_same_with_all(tmp_path: Path, write, architecture) -> None:
    folder = write(tmp_path, architecture)
    found = {}
    for kernels in ("torch", *(f"cpu:{isa}" for isa in ISAS)):
        run = EngineRun(folder, kernels=kernels)
        try:
            found[kernels] = run.generate(*prompts([3, 40, 17, 65]), max_tokens=24)
        finally:
            run.close()
    assert all(tokens == found["torch"] for tokens in found.values())


def logits(folder: Path, kernels: str, dtype: torch.dtype, prompt: list[int]) -> Tensor:
    """Of all the prompt's tokens, in one step."""
    decoder = Decoder.load(folder, dtype, "cpu", kernels=kernels)
    config, length = decoder.config, len(prompt)
    num_blocks = -(-length // BLOCK_SIZE)
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    batch = AttentionBatch.from_lists([length], [length], [list(range(num_blocks))], BLOCK_SIZE)
    with torch.inference_mode():
        rows = torch.arange(length)
        return decoder.forward(torch.tensor(prompt), rows, torch.zeros(shape, dtype=dtype), batch, rows).float()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean().sqrt())


@every_isa
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("write", [write_family, write_vector_sized])
def test_logits_in_bf16_are_as_exact_as_those_of_torch(tmp_path: Path, write, architecture, isa) -> None:
    folder = write(tmp_path, architecture)
    prompt = prompts([75])[0]
    exact = logits(folder, "torch", torch.float32, prompt)
    ours, theirs = (logits(folder, kernels, torch.bfloat16, prompt) for kernels in (f"cpu:{isa}", "torch"))
    assert error(ours, exact) < BF16_TOLERANCE * error(theirs, exact)
