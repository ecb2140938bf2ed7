"""A decoder split over ranks: the logits and KV blocks of the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.collectives.rank_links import RankLinks
from shared.errors import ConfigError
from shared.kernels.batch import AttentionBatch
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.rank_decoder import MicroBatch, RankDecoder
from shared.model.shard import Degrees
from tests.integration.engine.families import write_family
from tests.unit.collectives.in_threads import needs_library, run_group

pytestmark = needs_library

BLOCK_SIZE = 16
CHUNKS = ((40, 40), (1, 33), (5, 21), (1, 1))
"""(tokens to compute, tokens in all) of each sequence."""

SHAPES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}),
    "one KV head": ("LlamaForCausalLM", {"num_heads": 4, "num_kv_heads": 1, "head_dim": 32}),
    "12 heads, biases, uneven": (
        "LlamaForCausalLM",
        {
            "num_heads": 12,
            "num_kv_heads": 4,
            "head_dim": 32,
            "intermediate_size": 144,
            "vocab_size": 1000,
            "extra_config": {"attention_bias": True, "mlp_bias": True},
        },
    ),
    "no whole vectors": (
        "Qwen2ForCausalLM",
        {"num_heads": 12, "num_kv_heads": 2, "head_dim": 10, "hidden_size": 60, "intermediate_size": 101},
    ),
    "qk norm, tied": ("Qwen3ForCausalLM", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "tie": True}),
}


def batch_of(chunks: tuple[tuple[int, int], ...], first_block: int) -> MicroBatch:
    tables = []
    for _, length in chunks:
        num_blocks = -(-length // BLOCK_SIZE)
        tables.append(list(range(first_block, first_block + num_blocks)))
        first_block += num_blocks
    batch = AttentionBatch.from_lists([n for n, _ in chunks], [n for _, n in chunks], tables, BLOCK_SIZE)
    positions = torch.cat([torch.arange(length - count, length) for count, length in chunks])
    ends = torch.tensor([count for count, _ in chunks]).cumsum(0) - 1
    return MicroBatch(torch.arange(batch.num_tokens) * 7 % 128, positions, batch, ends, None)


def empty_pool(decoder: Decoder) -> Tensor:
    config = decoder.config
    shape = (9, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(decoder.dtype)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degrees", [Degrees(2, 1), Degrees(4, 1), Degrees(1, 2), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_ranks_give_what_one_decoder_gives(
    tmp_path: Path, name: str, degrees: Degrees, dtype: torch.dtype, kernels: str
) -> None:
    architecture, sizes = SHAPES[name]
    write_random_checkpoint(tmp_path, architecture, num_layers=3, **sizes)
    whole = Decoder.load(tmp_path, dtype, "cpu", kernels=kernels)
    expected_pool, pool = empty_pool(whole), empty_pool(whole)
    step = batch_of(CHUNKS, 0)
    parts = (batch_of(CHUNKS[:2], 0), batch_of(CHUNKS[2:], 6))
    with torch.inference_mode():
        expected = whole.forward(step.token_ids, step.positions, expected_pool, step.batch, step.logit_rows)
        split = [
            whole.forward(part.token_ids, part.positions, expected_pool, part.batch, part.logit_rows) for part in parts
        ]

    def work(links: RankLinks) -> list[Tensor]:
        with torch.inference_mode():
            decoder = RankDecoder.load_rank(tmp_path, dtype, kernels, degrees, links)
            found = [
                decoder.forward(step.token_ids, step.positions, pool, step.batch, step.logit_rows, None, candidates)
                for candidates in (0, 1, 5)
            ]
            return [*found, decoder.forward_parts(parts, pool)]

    everything, highest, five, in_parts = run_group(degrees.tensor, degrees.pipeline, work)[0]
    tolerance = (3e-5 if dtype == torch.float32 else 6e-2) * float(expected.abs().max())
    torch.testing.assert_close(everything, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(in_parts, torch.cat(split), rtol=0, atol=tolerance)
    torch.testing.assert_close(pool.float(), expected_pool.float(), rtol=0, atol=tolerance)
    assert torch.equal(highest.argmax(1), everything.argmax(1))
    assert torch.equal(highest.amax(1), everything.amax(1))
    assert torch.equal(five.topk(5).values, everything.topk(5).values)
    assert torch.equal(five[five.isfinite()], everything[five.isfinite()]), "each at its own token's place"


@pytest.mark.parametrize(
    ("degrees", "numbers"),
    [(Degrees(tensor=4), ("4", "6")), (Degrees(tensor=3), ("3", "2")), (Degrees(pipeline=3), ("3", "2"))],
)
def test_degrees_that_do_not_fit_are_refused_with_both_numbers(
    tmp_path: Path, degrees: Degrees, numbers: tuple[str, str]
) -> None:
    config = write_random_checkpoint(
        tmp_path, "LlamaForCausalLM", num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32
    )
    with pytest.raises(ConfigError) as refused:
        degrees.check(config)
    assert all(number in refused.value.message for number in numbers)


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(pipeline=2)], ids=str)
@pytest.mark.parametrize(
    ("family", "kind"), [("mixtral", "experts"), ("qwen3-moe", "experts"), ("deepseek-v2", "latent attention")]
)
def test_models_that_are_not_split_yet_are_refused_by_name(
    tmp_path: Path, family: str, kind: str, degrees: Degrees
) -> None:
    config = ModelConfig.load(write_family(tmp_path, family))
    Degrees().check(config)
    with pytest.raises(ConfigError, match=f"{config.architecture} has {kind}") as refused:
        degrees.check(config)
    assert refused.value.field == ("tp" if degrees.tensor > 1 else "pp")
