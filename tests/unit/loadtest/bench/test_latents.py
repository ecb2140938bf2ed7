"""The comparison of latents with expanded KV: both compute the same model, and bytes are what the formats keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor

from loadtest.bench.engine.latents import BLOCK_SIZE, Comparison, expanded, fill
from loadtest.bench.engine.work import active_parameters, weight_bytes
from shared.kernels.batch import AttentionBatch
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder

SIZES = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    write_random_checkpoint(
        folder, "DeepseekV2ForCausalLM", vocab_size=32000, num_layers=3, num_kv_heads=4, extra_config=SIZES
    )
    return folder


def logits(decoder: Decoder, pool: Tensor, lengths: list[tuple[int, int]]) -> Tensor:
    """Of a sequence's tokens, in steps from (start, end), over two blocks."""
    found = []
    for start, end in lengths:
        batch = AttentionBatch.from_lists([end - start], [end], [[3, 1]], BLOCK_SIZE)
        positions = torch.arange(start, end)
        found.append(decoder.forward(positions * 7 + 5, positions, pool, batch, torch.arange(end - start)))
    return torch.cat(found)


def test_expanded_kv_gives_the_same_logits(folder: Path) -> None:
    decoder = Decoder.load(folder, torch.float32, "cpu")
    pool = torch.zeros(decoder.config.block_layout(BLOCK_SIZE, "float32").shape(4))
    other, _ = expanded(decoder, 4)
    steps = [(0, 17), (17, 18), (18, 21), (21, 22)]
    expected = logits(decoder, pool, steps)
    pool.zero_()
    torch.testing.assert_close(logits(other, pool, steps), expected, rtol=1e-4, atol=1e-4)


def test_what_a_pool_is_filled_with_is_the_same_in_both(folder: Path) -> None:
    decoder = Decoder.load(folder, torch.float32, "cpu")
    pool = torch.zeros(decoder.config.block_layout(BLOCK_SIZE, "float32").shape(4))
    other, layers = expanded(decoder, 4)
    fill(pool, layers)
    copy = pool.clone()
    torch.testing.assert_close(logits(other, pool, [(25, 26)]), logits(decoder, copy, [(25, 26)]), rtol=1e-4, atol=1e-4)


def test_a_pair_reads_the_bytes_that_each_format_keeps(folder: Path) -> None:
    pair = Comparison(folder, torch.float32, 256).measure(2, 32, 1)
    values = 2 * 32 * 3 * 4  # sequences, tokens, layers, bytes
    assert pair.kv_bytes == (values * (32 + 8), values * 4 * 2 * 32)  # heads, planes, a row's padded width
    assert len(pair.results(1e6, 1e9)) == 4


def test_a_model_without_latents_is_refused(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path)
    with pytest.raises(typer.BadParameter, match="no latents"):
        Comparison(tmp_path, torch.float32, 64)


def test_a_step_reads_the_experts_that_its_tokens_choose(folder: Path) -> None:
    decoder = Decoder.load(folder, torch.float32, "cpu", kernels="torch")
    assert weight_bytes(decoder, 10_000) == pytest.approx(decoder.projection_bytes)
    one = weight_bytes(decoder, 1)
    assert one == pytest.approx(decoder.projection_bytes - decoder.expert_bytes / 2)
    assert one == pytest.approx(4 * active_parameters(decoder.config))
