"""The ops in torch, which are the references of all others: what the formulas give."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from shared.kernels.activation.reference import act_and_mul
from shared.kernels.attention.reference import QUERY_TILE, paged_attention
from shared.kernels.batch import AttentionBatch
from shared.kernels.experts.routing import choose_experts
from shared.kernels.experts.routing_rules import Routing
from shared.kernels.pool_view import PoolView
from shared.kernels.rmsnorm.reference import add_rms_norm, rms_norm
from shared.kernels.rotary.reference import rotate, write_kv
from shared.kernels.sampling import reference
from shared.kernels.sampling.philox import philox4x32, time_of, token_word
from shared.kernels.sampling.reference import NEAR, race_times, sample_tokens
from shared.kernels.sampling.rows import SamplingRows
from shared.kernels.torch_backend import TorchKernels
from shared.kv.checksum import BlockChecksum
from tests.examples import examples

from .attention_case import LAYER, AttentionCase
from .routing_case import FAMILIES, ROUTINGS
from .sampling_case import SamplingCase, broken_rows, wins_within_rounding


def run(case: AttentionCase, window: int | None = None) -> Tensor:
    return paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=window)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(1.5, False), (None, True), (0.7, True)])
def test_bounds_of_scores_and_sinks_follow_the_formula(
    softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    case = AttentionCase([(1, 9), (5, 5), (3, 11), (1, 1)], (6, 2))
    scoring: dict[str, Any] = {"softcap": softcap, "sinks": case.sinks if has_sinks else None}
    found = paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=window, **scoring)
    torch.testing.assert_close(found, case.expected(window, **scoring).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 4, 6, 100])
def test_chunks_begin_at_their_multiples(window: int) -> None:
    case = AttentionCase([(1, 9), (5, 5), (3, 11), (1, 1), (1, 12), (7, 13)], (6, 2))
    view: dict[str, Any] = {"window": window, "is_chunked": True}
    found = paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, **view)
    torch.testing.assert_close(found, case.expected(**view).float(), rtol=1e-5, atol=1e-5)


plans = st.lists(
    st.integers(1, 40).flatmap(lambda kv: st.tuples(st.sampled_from([1, 1, kv, (kv + 1) // 2]), st.just(kv))),
    min_size=1,
    max_size=6,
)


@examples(80)
@given(
    plan=plans,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 3, 16, 100]),
    seed=st.integers(0, 9),
)
def test_any_mix_of_chunks_and_decodes_follows_the_formula(
    plan: list[tuple[int, int]], heads: tuple[int, int], block_size: int, window: int | None, seed: int
) -> None:
    case = AttentionCase(plan, heads, block_size=block_size, seed=seed)
    torch.testing.assert_close(run(case, window).double(), case.expected(window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5, QUERY_TILE + 3])
def test_prompts_longer_than_a_tile_follow_the_formula(window: int | None) -> None:
    case = AttentionCase([(QUERY_TILE + 9, QUERY_TILE + 9), (2 * QUERY_TILE, 2 * QUERY_TILE + 30)], block_size=16)
    torch.testing.assert_close(run(case, window).double(), case.expected(window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype) -> None:
    case = AttentionCase([(1, 9), (6, 20), (1, 40)], dtype=dtype)
    assert run(case).dtype == dtype
    torch.testing.assert_close(run(case).double(), case.expected(), rtol=0, atol=0.02)


@pytest.mark.parametrize(("query_lens", "kv_lens"), [([0], [3]), ([4], [3]), ([1], [9])])
def test_lengths_out_of_order_are_refused(query_lens: list[int], kv_lens: list[int]) -> None:
    with pytest.raises(AssertionError):
        AttentionBatch(
            query_start=torch.tensor([0, *query_lens], dtype=torch.int32),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=torch.zeros((1, 2), dtype=torch.int32),
            slots=torch.zeros(sum(query_lens), dtype=torch.int64),
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            block_size=4,
        )


POOL = torch.randn(6, 2, 2, 1, 4, 8, generator=torch.Generator().manual_seed(0))


def test_scatter_undoes_gather_and_leaves_other_blocks() -> None:
    kernels, ids = TorchKernels(), torch.tensor([4, 0, 3])
    blocks = kernels.gather_blocks(POOL, ids)
    assert torch.equal(blocks, POOL[[4, 0, 3]])
    target = torch.zeros_like(POOL)
    kernels.scatter_blocks(blocks, target, ids)
    assert torch.equal(target[ids], POOL[ids])
    assert bool((target[[1, 2, 5]] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_those_of_the_host(dtype: torch.dtype) -> None:
    pool, ids = POOL.to(dtype), [5, 0, 0, 2]
    checksums = TorchKernels().block_checksums(pool, torch.tensor(ids)).tolist()
    host = BlockChecksum(pool[0].nbytes // 8).checksum_blocks(pool, ids)
    assert [value % 2**64 for value in checksums] == host


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (5, 3, 16), (0, 32)])
def test_rms_norm_rounds_exactly_like_transformers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = _random(*shape, dtype=dtype) * 3, _random(shape[-1], dtype=dtype)
    theirs = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    theirs.weight.data.copy_(weight)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 1e-5), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_norm_and_sum_and_keeps_its_arguments(dtype: torch.dtype) -> None:
    x, residual, weight = (_random(*shape, dtype=dtype) for shape in ((4, 16), (4, 16), (16,)))
    kept = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))
    centered = torch.nn.functional.layer_norm(total.float(), weight.shape, weight.float(), eps=1e-6)
    close = {"atol": 2e-2, "rtol": 2e-2} if x.dtype != torch.float32 else {}
    torch.testing.assert_close(rms_norm(total, weight, 1e-6, is_centered=True).float(), centered, **close)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_rounds_exactly_like_transformers(dtype: torch.dtype) -> None:
    query, key = _random(5, 4, 8, dtype=dtype), _random(5, 2, 8, dtype=dtype)
    angles = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    assert all(map(torch.equal, (rotate(query, cos, sin), rotate(key, cos, sin)), expected))


def test_act_and_mul_takes_the_gate_first() -> None:
    gate_up = _random(3, 10, dtype=torch.float32)
    expected = functional.silu(gate_up[:, :5]) * gate_up[:, 5:]
    assert torch.equal(act_and_mul(gate_up), expected)


def test_write_kv_fills_its_slots_of_its_layer_and_nothing_else() -> None:
    kv_blocks = torch.zeros(6, 2, 2, 3, 4, 8)
    qkv = _random(5, 9 * 8, dtype=torch.float32)
    key, value = (part.view(5, 3, 8) for part in (qkv[:, 24:48], qkv[:, 48:]))
    slots = torch.tensor([23, 0, 7, 8, 15])
    write_kv(key, value, PoolView.over(kv_blocks), 1, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(kv_blocks[slot // 4, 1, 0, :, slot % 4], key[row])
        assert torch.equal(kv_blocks[slot // 4, 1, 1, :, slot % 4], value[row])
    assert int((kv_blocks != 0).sum()) == key.numel() + value.numel()


def chosen(logits: list[float], bias: list[float] | None, routing: Routing) -> dict[int, float]:
    """Expert → weight of one token."""
    if routing.scoring == "softmax":
        total = math.fsum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    merits = [score + (bias[i] if bias else 0.0) for i, score in enumerate(scores)]
    size = routing.num_experts // routing.num_groups
    groups = [list(range(first, first + size)) for first in range(0, routing.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted((merits[i] for i in group), reverse=True)[: routing.group_score]))
    allowed = [expert for group in groups[: routing.top_groups] for expert in group]
    best = sorted(allowed, key=lambda expert: -merits[expert])[: routing.top_k]
    total = math.fsum(scores[expert] for expert in best) if routing.is_normalised else 1.0
    return {expert: scores[expert] / total * routing.scale for expert in best}


@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_and_weights_follow_the_rules(name: str) -> None:
    routing, rng = ROUTINGS[name], random.Random(name)
    bias = [rng.gauss(0, 0.3) for _ in range(12)] if routing.has_bias else None
    logits = [[rng.gauss(0, 2) for _ in range(12)] for _ in range(50)]
    found = choose_experts(torch.tensor(logits), None if bias is None else torch.tensor(bias), routing)
    for row, ids, weights in zip(logits, found[0].tolist(), found[1].tolist(), strict=True):
        expected = chosen(row, bias, routing)
        assert ids == list(expected)
        assert weights == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_chooses_alike_alone_and_among_others(name: str) -> None:
    routing = ROUTINGS[name]
    logits = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-0.5, 0.5, 12) if routing.has_bias else None
    ids, weights = choose_experts(logits, bias, routing)
    for row in range(40):
        its_ids, its_weights = choose_experts(logits[row : row + 1], bias, routing)
        assert its_ids.equal(ids[row : row + 1])
        # A vector's last lanes may be computed by another function than its first ones.
        torch.testing.assert_close(its_weights, weights[row : row + 1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ROUTINGS | FAMILIES)
def test_of_equal_experts_and_groups_the_first_are_chosen(name: str) -> None:
    routing = (ROUTINGS | FAMILIES)[name]
    logits = torch.full((3, routing.num_experts), 0.25)
    bias = torch.zeros(routing.num_experts) if routing.has_bias else None
    assert choose_experts(logits, bias, routing)[0].tolist() == [list(range(routing.top_k))] * 3


@examples(60)
@given(
    num_rows=st.integers(1, 8),
    vocab_size=st.sampled_from([1, 2, 10, 300]),
    seed=st.integers(0, 10_000),
    ties=st.booleans(),
)
def test_every_row_gives_the_token_that_wins(num_rows: int, vocab_size: int, seed: int, ties: bool) -> None:
    case = SamplingCase(num_rows, vocab_size, seed, ties)
    for row, token in enumerate(sample_tokens(case.logits, case.rows).tolist()):
        if case.temperatures[row] == 0:
            assert token == int(case.logits[row].argmax())
        else:
            assert wins_within_rounding(case.logits[row], case.rows, row, token)


def test_rows_without_a_choice_give_minus_one() -> None:
    logits, rows, tokens = broken_rows()
    assert sample_tokens(logits, rows).tolist() == tokens


def test_times_of_tokens_are_those_of_the_definition() -> None:
    choose = random.Random(1)
    keys = [(choose.getrandbits(64), choose.getrandbits(40)) for _ in range(3)] + [(2**64 - 1, 0)]
    rows = SamplingRows.from_lists([1.0] * 4, [0] * 4, [1.0] * 4, [0.0] * 4, *zip(*keys, strict=True))
    found = race_times(rows.seeds, rows.positions, 150).tolist()
    for times, (seed, position) in zip(found, keys, strict=True):
        expected = [time_of(token_word(seed, position, token)) for token in range(150)]
        assert times == pytest.approx(expected, rel=3e-7, abs=0.0)


def test_times_are_right_at_the_ends_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [0, 1, 2, 3, 1000, 2**31, 2 * NEAR - 1, 2 * NEAR, 2 * NEAR + 2, 2**32 - 1000, 2**32 - 2, 2**32 - 1]
    monkeypatch.setattr(reference, "_token_words", lambda *_: torch.tensor([words]))
    (times,) = race_times(torch.zeros(1), torch.zeros(1), len(words)).tolist()
    assert times == pytest.approx([time_of(word) for word in words], rel=3e-7, abs=0.0)


def test_the_reference_never_waits_for_its_device() -> None:
    """On a device a copy to the host would break a graph's capture; the meta device has no values to copy."""
    case = SamplingCase(3, 10, 0)
    rows = SamplingRows(*(tensor.to("meta") for tensor in vars(case.rows).values()))
    assert sample_tokens(case.logits.to("meta"), rows).shape == (3,)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_words_depend_on_seed_position_and_token_alone_and_differ() -> None:
    keys = list(product((7, 2**32 + 7, 2**63), (0, 11, 2**33), (*range(200), 128_255)))
    words = {key: token_word(*key) for key in keys}
    assert len(set(words.values())) == len(keys)
    assert words[7, 11, 5] == token_word(7, 11, 5)
