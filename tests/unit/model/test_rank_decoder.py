"""A decoder split over ranks: the logits and KV blocks of the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.collectives.rank_links import Backend, RankLinks
from shared.errors import ConfigError
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView, dtype_name
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.layers.expert_placement import Placement, set_loads
from shared.model.ranks.rank_decoder import MicroBatch, RankDecoder
from shared.model.ranks.shard import Degrees
from tests.integration.engine.families import EXPERTS as MOE
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

EXPERTS: dict[str, Mapping[str, Any]] = {
    "mixtral": {},
    "qwen3-moe": {"extra_config": {**MOE["qwen3-moe"][1], "num_experts": 7, "mlp_only_layers": [1]}},
    "one expert a token": {"extra_config": {"num_local_experts": 4, "num_experts_per_tok": 1}, "intermediate_size": 37},
    "deepseek-v2": {"num_heads": 12, "extra_config": {**MOE["deepseek-v2"][1], "attention_bias": True}},
    "deepseek-v3": {"tie": True},
    "deepseek-v3 of whole vectors": {
        "extra_config": {
            **MOE["deepseek-v3"][1],
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 96,
            "n_shared_experts": 2,
        },
        "hidden_size": 96,
    },
}
"""Family → what differs from it. Of 5, 7, 4, 9 and 12 experts; one whose shared experts are wider than a rank's own."""
EXPERT_DEGREES = (
    Degrees(2),
    Degrees(4),
    Degrees(1, 3),
    Degrees(2, 2),
    Degrees(2, expert=2),
    Degrees(4, expert=2),
    Degrees(4, expert=4),
    Degrees(2, 3, expert=2),
)


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


def empty_pool(decoder: Decoder) -> PoolView:
    layout = decoder.config.block_layout(BLOCK_SIZE, dtype_name(decoder.dtype))
    pool = PoolView.of(torch.zeros(layout.shape(9), dtype=torch.uint8), layout)
    pool.rows.normal_(generator=torch.Generator().manual_seed(3))
    return pool


@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degrees", [Degrees(2, 1), Degrees(4, 1), Degrees(1, 2), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_ranks_give_what_one_decoder_gives(
    tmp_path: Path, name: str, degrees: Degrees, dtype: torch.dtype, kernels: str
) -> None:
    architecture, sizes = SHAPES[name]
    write_random_checkpoint(tmp_path, architecture, num_layers=3, **sizes)
    gives_what_one_decoder_gives(tmp_path, degrees, dtype, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("degrees", EXPERT_DEGREES, ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_and_latents_over_ranks_give_what_one_decoder_gives(
    tmp_path: Path, name: str, degrees: Degrees, kernels: str
) -> None:
    family = name.removesuffix(" of whole vectors")
    write_family(tmp_path, family, **{"num_layers": 3, "num_kv_heads": 1, **EXPERTS[name]})
    gives_what_one_decoder_gives(tmp_path, degrees, torch.float32, kernels)


@pytest.mark.parametrize("degrees", [Degrees(4, expert=2), Degrees(2, 2)], ids=str)
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_bf16_experts_over_ranks_give_what_one_decoder_gives(tmp_path: Path, family: str, degrees: Degrees) -> None:
    """All experts are chosen: else rounding could choose others."""
    all_chosen = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 12} if family == "deepseek-v3" else {}
    write_family(tmp_path, family, num_layers=3, extra_config={**MOE[family][1], **all_chosen})
    gives_what_one_decoder_gives(tmp_path, degrees, torch.bfloat16, "auto")


FIVE, TWELVE = ((0, 3, 4), (0, 1, 2, 3)), ((0, 4, 5, 6, 7, 11), (0, 1, 2, 3, 8, 9, 10, 11))
"""Experts of two sets of ranks, out of order and some in both."""


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("family", "degrees", "placement"),
    [
        ("mixtral", Degrees(2, expert=2), (FIVE, None, FIVE)),
        ("mixtral", Degrees(4, expert=2), (FIVE, FIVE, FIVE)),
        ("mixtral", Degrees(3, expert=3), (((0, 4), (0, 1, 2), (0, 2, 3)), ((2,), (0, 1), (3, 4)), None)),
        ("deepseek-v3", Degrees(2, 3, expert=2), (None, TWELVE, TWELVE)),
    ],
    ids=str,
)
def test_copies_of_experts_give_what_one_decoder_gives(
    tmp_path: Path, family: str, degrees: Degrees, placement: Placement, kernels: str
) -> None:
    sizes = {"num_heads": 6, "num_kv_heads": 1} if degrees.tensor == 3 else {}
    write_family(tmp_path, family, **{"num_layers": 3, "num_kv_heads": 1, **sizes})
    gives_what_one_decoder_gives(tmp_path, degrees, torch.float32, kernels, placement)


@pytest.mark.parametrize(
    ("family", "degrees", "placement"),
    [
        ("LlamaForCausalLM", Degrees(2), ()),
        ("LlamaForCausalLM", Degrees(2, 2), ()),
        ("mixtral", Degrees(2, expert=2), (FIVE, None, FIVE)),
        ("deepseek-v3", Degrees(2, 2), ()),
    ],
    ids=str,
)
def test_what_ranks_make_lies_on_their_device(
    tmp_path: Path, family: str, degrees: Degrees, placement: Placement
) -> None:
    """Sums over torch's groups, as on GPUs; what is made without a device lies on another one here and does not fit."""
    write_family(tmp_path, family, num_layers=3, num_kv_heads=1)
    gives_what_one_decoder_gives(tmp_path, degrees, torch.float32, "torch", placement, "gloo", elsewhere="meta")


def gives_what_one_decoder_gives(
    tmp_path: Path,
    degrees: Degrees,
    dtype: torch.dtype,
    kernels: str,
    placement: Placement = (),
    backend: Backend = "shm",
    elsewhere: str = "cpu",
) -> None:
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
            decoder = RankDecoder.load_rank(tmp_path, dtype, kernels, degrees, links, None, placement)
            with torch.device(elsewhere):
                found = [
                    decoder.forward(step.token_ids, step.positions, pool, step.batch, step.logit_rows, None, candidates)
                    for candidates in (0, 1, 5)
                ]
                return [*found, decoder.forward_parts(parts, pool)]

    everything, highest, five, in_parts = run_group(degrees.tensor, degrees.pipeline, work, backend)[0]
    tolerance = (3e-5 if dtype == torch.float32 else 6e-2) * float(expected.abs().max())
    torch.testing.assert_close(everything, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(in_parts, torch.cat(split), rtol=0, atol=tolerance)
    torch.testing.assert_close(pool.rows.float(), expected_pool.rows.float(), rtol=0, atol=tolerance)
    assert torch.equal(highest.argmax(1), everything.argmax(1))
    assert torch.equal(highest.amax(1), everything.amax(1))
    assert torch.equal(five.topk(5).values, everything.topk(5).values)
    assert torch.equal(five[five.isfinite()], everything[five.isfinite()]), "each at its own token's place"


@pytest.mark.parametrize(
    ("degrees", "numbers"),
    [
        (Degrees(tensor=4), ("4", "6")),
        (Degrees(tensor=3), ("3", "2")),
        (Degrees(pipeline=3), ("3", "2")),
        (Degrees(tensor=2, expert=2), ("ep is 2", "no experts")),
    ],
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


def test_choices_of_experts_count_for_each_rank_that_has_a_part_of_them(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral", num_layers=3)
    step = batch_of(CHUNKS, 0)
    # The last layer's feed-forward block is computed for the wanted rows alone.
    num_choices = 2 * (2 * step.batch.num_tokens + len(CHUNKS))

    def work(links: RankLinks) -> list[int]:
        with torch.inference_mode():
            decoder = RankDecoder.load_rank(tmp_path, torch.float32, "auto", Degrees(4, expert=2), links)
            decoder.forward(step.token_ids, step.positions, empty_pool(decoder), step.batch, step.logit_rows)
            return decoder.expert_tokens()

    ranks = run_group(4, 1, work)
    assert all(found == ranks[0] for found in ranks), "all choose alike"
    first, again, second, too = ranks[0]
    assert (first, second) == (again, too), "the ranks of a set have parts of the same experts"
    assert first + second == num_choices
    assert min(first, second) > 0
    whole = Decoder.load(tmp_path, torch.float32, "cpu")
    with torch.inference_mode():
        whole.forward(step.token_ids, step.positions, empty_pool(whole), step.batch, step.logit_rows)
    assert whole.expert_tokens() == [num_choices]


def test_the_copies_of_an_expert_compute_equal_parts_of_its_tokens(tmp_path: Path) -> None:
    config = write_family(tmp_path, "mixtral", num_layers=1, vocab_size=128)
    num_tokens, sets = 96, FIVE
    step = batch_of(((num_tokens, num_tokens),), 0)
    step = step._replace(logit_rows=torch.arange(num_tokens))

    def work(links: RankLinks) -> tuple[list[int], dict[int, tuple[int, ...]], int]:
        with torch.inference_mode():
            decoder = RankDecoder.load_rank(tmp_path, torch.float32, "auto", Degrees(2, expert=2), links, None, (sets,))
            decoder.forward(step.token_ids, step.positions, empty_pool(decoder), step.batch, step.logit_rows)
            return decoder.expert_tokens(), decoder.expert_counts(), decoder.expert_bytes

    ranks = run_group(2, 1, work)
    tokens, counts, _ = ranks[0]
    assert (tokens, counts) == ranks[1][:2], "all choose alike"
    assert counts.keys() == {0}
    assert sum(tokens) == sum(counts[0]) == 2 * num_tokens
    # Turns: an expert's tokens are its rows of the step, which need not be as many even as odd ones.
    assert tokens == pytest.approx(set_loads(counts[0], sets), abs=num_tokens / 4)
    whole = Decoder.load(tmp_path, torch.float32, "cpu")
    assert [num_bytes for *_, num_bytes in ranks] == [whole.expert_bytes * len(own) // 5 for own in sets]
    assert config.exists()


@pytest.mark.parametrize(
    ("family", "degrees", "numbers"),
    [
        ("mixtral", Degrees(tensor=4, expert=3), ("ep is 3", "tp, 4")),
        ("mixtral", Degrees(tensor=2, expert=4), ("ep is 4", "tp, 2")),
        ("one expert a token", Degrees(tensor=4, expert=4), ("ep is 4", "3 experts")),
        ("deepseek-v2", Degrees(tensor=3), ("tp is 3", "4 attention heads")),
        ("deepseek-v3", Degrees(pipeline=3), ("pp is 3", "2 layers")),
    ],
)
def test_experts_that_do_not_fit_are_refused_with_both_numbers(
    tmp_path: Path, family: str, degrees: Degrees, numbers: tuple[str, str]
) -> None:
    config = load_config(write_family(tmp_path, family))
    with pytest.raises(ConfigError) as refused:
        degrees.check(config)
    assert all(number in refused.value.message for number in numbers)


def test_experts_of_fewer_columns_than_ranks_are_refused_unless_they_are_whole(tmp_path: Path) -> None:
    config = load_config(write_family(tmp_path, "mixtral", intermediate_size=3))
    with pytest.raises(ConfigError, match="over 4 ranks, too many for an expert's intermediate size of 3"):
        Degrees(tensor=4).check(config)
    Degrees(tensor=4, expert=4).check(config)
    Degrees(tensor=4, expert=2).check(config)
