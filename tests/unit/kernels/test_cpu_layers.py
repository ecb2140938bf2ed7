"""All layers by one call of the C++ kernels: what the ops give one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.layer_stack import CpuLayerStack
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder

from .isas import every_isa, needs_library

pytestmark = needs_library

BLOCK_SIZE = 16
CHUNKS = [(40, 40), (1, 33), (5, 21), (1, 1)]  # (tokens to compute, tokens in all) of each sequence
ENDS = [39, 40, 45, 46]  # the last token of each
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


def step() -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """(token_ids, positions, batch) of the chunks."""
    tables, first = [], 0
    for _, length in CHUNKS:
        blocks = -(-length // BLOCK_SIZE)
        tables.append(list(range(first, first + blocks)))
        first += blocks
    batch = AttentionBatch.from_lists([n for n, _ in CHUNKS], [n for _, n in CHUNKS], tables, BLOCK_SIZE)
    positions = torch.cat([torch.arange(length - count, length) for count, length in CHUNKS])
    return torch.arange(batch.num_tokens) * 7 % 128, positions, batch


def pool(decoder: Decoder) -> torch.Tensor:
    config = decoder.config
    shape = (9, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(decoder.dtype)


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "extra"), [("LlamaForCausalLM", {}), ("Qwen2ForCausalLM", {}), ("Qwen3ForCausalLM", WINDOWED)]
)
@pytest.mark.parametrize(
    "rows", [ENDS, ENDS[::-1], [39, 46], [], [3, 20, 39], list(range(47)), [0, 7, 20, 33, 39, 41]], ids=str
)
def test_the_stack_gives_what_the_ops_give(tmp_path: Path, isa, architecture, extra, dtype, rows):
    write_random_checkpoint(
        tmp_path, architecture, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, extra_config=extra
    )
    stacked = Decoder.load(tmp_path, dtype, "cpu", kernels=f"cpu:{isa}")
    assert isinstance(stacked._stack, CpuLayerStack)
    one_by_one = stacked.op_by_op(stacked.kernels)
    token_ids, positions, batch = step()
    logit_rows = torch.tensor(rows, dtype=torch.int64)
    found_pool, expected_pool = pool(stacked), pool(stacked)
    with torch.inference_mode():
        found = stacked.forward(token_ids, positions, found_pool, batch, logit_rows)
        expected = one_by_one.forward(token_ids, positions, expected_pool, batch, logit_rows)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    scale = float(expected.abs().max()) if rows else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)
    torch.testing.assert_close(found_pool, expected_pool, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_isa
def test_every_instruction_set_gives_the_logits_of_torch(tmp_path: Path, isa, dtype):
    write_random_checkpoint(tmp_path, "Qwen2ForCausalLM", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32)
    expected_by = Decoder.load(tmp_path, dtype, "cpu", kernels="torch")
    token_ids, positions, batch = step()
    logit_rows = torch.tensor(ENDS, dtype=torch.int64)
    found_pool, expected_pool = pool(expected_by), pool(expected_by)
    found_by = Decoder.load(tmp_path, dtype, "cpu", kernels=f"cpu:{isa}")
    with torch.inference_mode():
        found = found_by.forward(token_ids, positions, found_pool, batch, logit_rows)
        expected = expected_by.forward(token_ids, positions, expected_pool, batch, logit_rows)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for ours, theirs in ((found, expected), (found_pool, expected_pool)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


def test_layers_of_other_sizes_are_left_to_the_ops(tmp_path: Path):
    write_random_checkpoint(tmp_path, "LlamaForCausalLM", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    assert Decoder.load(tmp_path, torch.float32, "cpu", kernels="cpu")._stack is None
