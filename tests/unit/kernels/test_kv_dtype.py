"""KV kept in fewer bits than it is computed in: rounded once when written, read as it was rounded, by every backend."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.kernels.backends import cpu as cpu_backend
from shared.kernels.backends.registry import choose_kernels
from shared.kernels.cpu.layer_stack import CpuLayerStack
from shared.kernels.pool_view import PoolView, encode
from shared.kernels.torch_backend import TorchKernels
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from tests.examples import examples

from . import attention_checks, comparing, decoder_checks
from .attention_case import LAYER, AttentionCase, pool_of_nan
from .conftest import Run
from .isas import EACH_ISA, needs_library
from .test_cpu_linear import ENDS, WINDOWED, step

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
MIXED = [(1, 1), (9, 9), (1, 37), (4, 70), (2, 2), (1, 16), (70, 130)]
SLOTS = torch.tensor([0, 47, 5, 16, 31, 40, 1])
NUM_ROWS = 130
PLACEMENTS = [((4, 2), 64, False), ((6, 1), 128, True), ((3, 3), 32, True)]


@pytest.fixture(params=["torch", *EACH_ISA])
def kernels(request: pytest.FixtureRequest) -> DecoderOps:
    return TorchKernels() if request.param == "torch" else cpu_backend.CpuKernels(request.param)


def placed(
    kernels: DecoderOps, kv_dtype: torch.dtype, heads: tuple[int, int], head_dim: int, norms: bool
) -> tuple[Tensor, PoolView]:
    """The placed query and the pool of some random tokens."""
    num_heads, num_kv_heads = heads
    query, key, value = (
        comparing.random_tensor(7, count, head_dim, dtype=FP32, device="cpu", seed=seed)
        for seed, count in enumerate((num_heads, num_kv_heads, num_kv_heads))
    )
    angles = comparing.random_tensor(7, head_dim // 2, dtype=FP32, device="cpu").repeat(1, 2)
    norm = comparing.random_tensor(head_dim, dtype=FP32, device="cpu") if norms else None
    pool = pool_of_nan((3, 2, 2, num_kv_heads, 16, head_dim), kv_dtype)
    pool.memory.zero_()
    query = kernels.rotate_and_write(
        query, key, value, angles.cos(), angles.sin(), pool, 1, SLOTS, q_norm=norm, k_norm=norm, eps=1e-6
    )
    return query, pool


@pytest.mark.parametrize(("heads", "head_dim", "norms"), PLACEMENTS)
def test_what_is_written_is_rounded_once(
    kernels: DecoderOps, heads: tuple[int, int], head_dim: int, norms: bool
) -> None:
    query, narrow = placed(kernels, BF16, heads, head_dim, norms)
    same_query, wide = placed(kernels, FP32, heads, head_dim, norms)
    assert torch.equal(query, same_query)
    assert torch.equal(narrow.rows, wide.rows.to(BF16))
    assert bool(narrow.memory.any())


@pytest.mark.parametrize("kv_dtype", [BF16, INT8, FP8])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((21, 3), 80), ((8, 2), 24), ((3, 1), 16)])
def test_attention_reads_what_was_written(
    kernels: DecoderOps, window: int | None, heads: tuple[int, int], head_dim: int, kv_dtype: torch.dtype
) -> None:
    case = AttentionCase(MIXED, heads, head_dim, block_size=16, kv_dtype=kv_dtype)
    assert case.pool.dtype == kv_dtype
    found = kernels.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.1, window=window)
    assert found.dtype == FP32
    torch.testing.assert_close(found.double(), case.expected(window, 0.1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, 1.5, False), (None, None, True), (33, 1.5, True)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_codes_are_attended_to_with_bounds_of_scores_and_sinks(
    kernels: DecoderOps,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    case = AttentionCase(MIXED, (12, 2), 48, block_size=16, dtype=dtype, kv_dtype=kv_dtype)
    scoring = {"softcap": softcap, "sinks": case.sinks if has_sinks else None}
    found = kernels.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.1, window=window, **scoring)
    assert found.dtype == dtype
    tolerance = comparing.TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), case.expected(window, 0.1, **scoring), rtol=tolerance, atol=tolerance)


@given(
    st.sampled_from([INT8, FP8]),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([2, 10, 16, 48, 96, 128]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=4),
    st.none() | st.integers(1, 80),
)
@examples(60)
def test_codes_of_any_shape_are_attended_to(kv_dtype, block_size, head_dim, num_kv_heads, group, plan, window):
    plan = [(query_len, query_len + before) for query_len, before in plan]
    heads = (num_kv_heads * group, num_kv_heads)
    case = AttentionCase(plan, heads, head_dim, block_size, kv_dtype=kv_dtype)
    kernels = choose_kernels("cpu", FP32, "auto")
    found = kernels.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.2, window=window)
    torch.testing.assert_close(found.double(), case.expected(window, 0.2), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize(("heads", "head_dim", "norms"), PLACEMENTS)
def test_codes_are_made_of_what_would_be_written(
    kernels: DecoderOps, heads: tuple[int, int], head_dim: int, norms: bool, kv_dtype: torch.dtype
) -> None:
    query, narrow = placed(kernels, kv_dtype, heads, head_dim, norms)
    same_query, wide = placed(kernels, FP32, heads, head_dim, norms)
    assert torch.equal(query, same_query)
    used = (SLOTS // 16, 1, slice(None), slice(None), SLOTS % 16)
    codes, scales = encode(wide.rows[used], kv_dtype)
    torch.testing.assert_close(narrow.scales[used], scales, rtol=1e-6, atol=0)
    assert float((narrow.rows[used].float() == codes.float()).float().mean()) > 0.99  # others lay between two
    opened = narrow.rows[used].float() * narrow.scales[used][..., None]
    torch.testing.assert_close(opened, codes.float() * scales[..., None], rtol=0.13, atol=1.01 * float(scales.max()))


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_backend_makes_the_same_codes_of_the_same_numbers(
    kernels: DecoderOps, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Ties, subnormal codes, numbers at the ends of the range, and rows that no scale fits."""
    rows = torch.randn(NUM_ROWS, 1, 64, generator=torch.Generator().manual_seed(0)) ** 5
    rows *= 2.0 ** torch.arange(-60, NUM_ROWS - 60)[:, None, None]
    rows[0] = 0.0
    rows[1] *= 2.0**-80
    rows[2] = torch.linspace(-127, 127, 64)
    rows[3] = torch.arange(64) - 32.5
    rows[3, 0, 0] = 127.0
    rows[4] = torch.arange(-32, 32) * 2.0**-10
    rows[4, 0, 0] = 448.0
    rows[5, 0, 7], rows[6, 0, 9], rows[7, 0, 63] = math.inf, -math.inf, math.nan
    rows = rows.to(dtype)
    pool = pool_of_nan((NUM_ROWS, 1, 2, 1, 16, 64), kv_dtype)
    flat = torch.ones(NUM_ROWS, 64, dtype=dtype)
    slots = 16 * torch.arange(NUM_ROWS) + torch.arange(NUM_ROWS) % 16
    kernels.rotate_and_write(rows, rows, rows, flat, 0 * flat, pool, 0, slots, q_norm=None, k_norm=None, eps=1e-6)
    codes, scales = encode(rows, kv_dtype)
    used = (slots // 16, 0, 1, slice(None), slots % 16)
    assert torch.equal(pool.rows.view(torch.uint8)[used], codes.view(torch.uint8))
    torch.testing.assert_close(pool.scales[used], scales, rtol=0, atol=0, equal_nan=True)
    assert scales[5:8].isnan().all()
    assert scales[:2].eq(0).all()
    assert scales[8:].isfinite().all()


@given(st.sampled_from([INT8, FP8]), st.integers(0, 1 << 30), st.integers(-90, 90), st.sampled_from([2, 24, 128]))
@examples(200)
def test_codes_are_the_nearest_and_depend_on_their_token_alone(kv_dtype, seed, exponent, head_dim):
    rows = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = encode(rows, kv_dtype)
    alone, its_scale = encode(rows[1:2, 1:], kv_dtype)
    assert torch.equal(alone.float(), codes[1:2, 1:].float())
    assert torch.equal(its_scale, scales[1:2, 1:])
    error = (codes.double() * scales.double()[..., None] - rows.double()).abs()
    step = scales.double()[..., None].expand(rows.shape)
    if kv_dtype == FP8:  # three bits behind the leading one, and steps of 2^-9 at least
        step = torch.maximum(rows.double().abs() / 8, step / 512)
    assert bool((error <= 0.5001 * step).all())


@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize("has_window", [False, True])
def test_triton_attends_to_codes(interpreted: Run, kv_dtype: torch.dtype, has_window: bool) -> None:
    scoring = {"window": 9, "softcap": 1.5, "has_sinks": True} if has_window else {}
    interpreted(
        attention_checks.check_attention, MIXED[:4], heads=(4, 2), head_dim=24, block_size=16, kv_dtype=kv_dtype,
        **scoring,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [INT8, FP8])
@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 2, None), (80, 3, 9), (128, 1, None)])
def test_triton_attends_to_codes_of_more_shapes(
    interpreted: Run, head_dim: int, group: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    interpreted(
        attention_checks.check_attention, MIXED[:-1], heads=(group, 1), head_dim=head_dim, block_size=16,
        kv_dtype=kv_dtype, window=window,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 2, None), (80, 3, 9), (128, 1, None)])
def test_triton_reads_what_was_written(interpreted: Run, head_dim: int, group: int, window: int | None) -> None:
    interpreted(
        attention_checks.check_attention, MIXED[:-1], heads=(group, 1), head_dim=head_dim, block_size=16, kv_dtype=BF16,
        window=window,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", [BF16, INT8, FP8])
@pytest.mark.parametrize(("heads", "head_dim", "norms"), PLACEMENTS)
def test_triton_writes_in_the_dtype_of_the_pool(
    interpreted: Run, heads: tuple[int, int], head_dim: int, norms: bool, kv_dtype: torch.dtype
) -> None:
    """To the tolerance of bf16 and no closer: the interpreter cuts off where a GPU rounds."""
    interpreted(
        decoder_checks.check_rotate_and_write, num_tokens=3, heads=heads, head_dim=head_dim, block_size=16, norms=norms,
        kv_dtype=kv_dtype,
    )  # fmt: skip


@needs_library
@pytest.mark.parametrize("rows", [ENDS, [3, 20, 39]], ids=str)
@pytest.mark.parametrize(("architecture", "extra"), [("LlamaForCausalLM", {}), ("Qwen3ForCausalLM", WINDOWED)])
@pytest.mark.parametrize("kv_dtype", [BF16, INT8, FP8])
def test_all_layers_in_one_call_give_what_the_ops_give(tmp_path: Path, architecture, extra, rows, kv_dtype):
    write_random_checkpoint(
        tmp_path, architecture, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, extra_config=extra
    )
    stacked = Decoder.load(tmp_path, FP32, "cpu", kernels="cpu")
    assert isinstance(stacked._stack, CpuLayerStack)
    token_ids, positions, batch = step()
    found_pool, expected_pool = (pool_of_nan((9, 3, 2, 2, 16, 32), kv_dtype) for _ in range(2))
    for each, plane, layer in itertools.product((found_pool, expected_pool), range(2), range(3)):
        cached = torch.randn(9 * 16, 2, 32, generator=torch.Generator().manual_seed(plane + 2 * layer))
        each.write(plane, layer, torch.arange(9 * 16), cached)
    with torch.inference_mode():
        found, expected = (
            decoder.forward(token_ids, positions, blocks, batch, torch.tensor(rows))
            for decoder, blocks in ((stacked, found_pool), (stacked.op_by_op(stacked.kernels), expected_pool))
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert torch.equal(found_pool.memory, expected_pool.memory)


@pytest.mark.parametrize(("compute", "kv"), [(BF16, FP32), (FP32, FP16), (FP16, BF16), (FP16, INT8), (FP16, FP8)])
def test_other_pairs_of_dtypes_are_refused(kernels: DecoderOps, compute: torch.dtype, kv: torch.dtype) -> None:
    case = AttentionCase([(1, 5)], (4, 2), 64, block_size=16, dtype=compute, kv_dtype=compute)
    pool = pool_of_nan(tuple(case.pool.rows.shape), kv)
    with pytest.raises(AssertionError, match=f"KV in {kv} beside {compute}"):
        kernels.paged_attention(case.query, pool, LAYER, case.batch, scale=1.0, window=None)


@pytest.mark.parametrize("kv_dtype", [FP32, BF16, INT8, FP8])
def test_zeros_take_the_place_of_numbers_that_broke_and_of_no_other(kernels: DecoderOps, kv_dtype: torch.dtype) -> None:
    """As the kernels write them, in the layer and for the tokens that are named."""
    query, key, value = (
        comparing.random_tensor(7, count, 64, dtype=FP32, device="cpu", seed=seed)
        for seed, count in enumerate((4, 2, 2))
    )
    key[2, 1, 5], value[4, 0, 7] = math.nan, math.inf
    flat = torch.ones(7, 64), torch.zeros(7, 64)
    pool = pool_of_nan((3, 2, 2, 2, 16, 64), kv_dtype)
    pool.memory.zero_()
    for layer in range(2):
        kernels.rotate_and_write(query, key, value, *flat, pool, layer, SLOTS, q_norm=None, k_norm=None, eps=1e-6)
    before = pool.memory.clone()
    pool.blank_broken(1, SLOTS[:4])
    opened = pool.open(pool.memory, FP32).view(3, 2, 2, 2, 16, 64)
    broken = ~opened.isfinite().flatten(4).all(-1)  # [num_blocks, num_layers, num_planes, num_kv_heads]
    assert broken.nonzero().tolist() == sorted([[0, 0, 0, 1], [1, 0, 1, 0], [1, 1, 1, 0]])
    assert torch.equal(pool.memory[:, 0], before[:, 0])
    pool.blank_broken(1, SLOTS)
    assert pool.open(pool.memory[:, 1], FP32).isfinite().all()
    assert int((pool.memory[:, 1] != before[:, 1]).sum()) <= 2 * 4
