"""Linear layers of the C++ kernels with every instruction set, their packing, and all layers in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels.backends.cpu import CpuKernels
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.layer_stack import CpuLayerStack
from shared.kernels.cpu.linear import CompressedLinear, PackedLinear, PanelLinear, fits_panels, pack
from shared.kernels.pool_view import PoolView
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from tests.examples import examples

from .cpu_case import DTYPES, close, random
from .isas import EACH_ISA, every_isa, needs_library

pytestmark = needs_library

FLUSHED = torch.finfo(torch.bfloat16).tiny
"""Instructions that multiply bf16 may take numbers below the smallest normal one for 0."""


@pytest.fixture(scope="module", params=EACH_ISA)
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size"),
    [
        *((rows, 64, 96) for rows in (0, 1, 2, 3, 4, 12, 13, 36, 37, 75)),
        (3, 16, 32),
        (5, 1040, 160),
        (240, 1040, 160),  # more rows, and more of a row, than are worked on at a time
        (300, 4112, 160),  # more bytes of rows, and of panels, than are held at a time
        (1000, 768, 160),  # several chunks of rows that are held together, and some that are left
        (4, 96, 35),
        (60, 40, 32),
    ],
)
def test_linear(cpu: CpuKernels, dtype: torch.dtype, rows: int, in_size: int, out_size: int) -> None:
    x, weight = random(rows, in_size, dtype=dtype), random(out_size, in_size, dtype=dtype, seed=1)
    for bias in (None, random(out_size, dtype=dtype, seed=2)):
        linear = cpu.make_linear(weight.clone(), bias, own=True)
        assert (linear.in_size, linear.out_size, linear.dtype) == (in_size, out_size, dtype)
        exact = (x.double() @ weight.double().t() + (0 if bias is None else bias.double())).to(dtype)
        close(linear.forward(x), exact)


def test_nan_and_infinity_of_a_row_stay_in_its_outputs(cpu: CpuKernels) -> None:
    x = random(5, 64, dtype=torch.bfloat16)
    x[1, 3], x[4, 60] = float("nan"), float("inf")
    out = cpu.make_linear(random(96, 64, dtype=torch.bfloat16, seed=1), None, own=True).forward(x)
    assert out[1].isnan().all()
    assert not out[4].isfinite().any()
    assert out[[0, 2, 3]].isfinite().all()


def test_nan_and_infinite_weights_show_in_their_outputs(cpu: CpuKernels) -> None:
    weight = random(96, 64, dtype=torch.bfloat16)
    weight[3, 7], weight[40, 63] = float("nan"), float("-inf")
    out = cpu.make_linear(weight, None, own=True).forward(random(5, 64, dtype=torch.bfloat16, seed=1))
    assert out[:, 3].isnan().all()
    assert out[:, 40].isinf().all()
    assert out[:, [i for i in range(96) if i not in (3, 40)]].isfinite().all()


@examples(40)  # for each packing
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([16, 528, 1040]),
    scale=st.floats(1e-30, 1e30),
    num_odd=st.integers(0, 12),
    odd=st.sampled_from([0.0, -0.0, 1e-39, 1e-20, -1e-10, 1e20, 3e38]),
    num_zero=st.integers(0, 100_000),
)
def test_every_weight_is_read_to_the_bit(
    cpu: CpuKernels, seed: int, size: int, scale: float, num_odd: int, odd: float, num_zero: int
) -> None:
    weight = scale * random(64, size, dtype=torch.float32, seed=seed)
    places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))
    weight.view(-1)[places[:num_zero]] = 0.0
    weight.view(-1)[places[:num_odd]] = odd
    weight = weight.to(torch.bfloat16)
    linear = cpu.make_linear(weight.clone(), None, own=True)
    x = torch.eye(size, dtype=torch.bfloat16)  # each row picks one column of the weight
    for rows in (x[:1], x[:16], x):
        found = linear.forward(rows.contiguous())
        torch.testing.assert_close(found, weight.t()[: rows.shape[0]] + 0.0, rtol=0, atol=FLUSHED)


def test_weights_of_other_dtypes_are_not_packed(cpu: CpuKernels) -> None:
    with pytest.raises(AssertionError, match="float16 is neither"):
        cpu.make_linear(random(96, 64, dtype=torch.float16), None, own=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_not_its_own_stays_as_it_is(cpu: CpuKernels, dtype: torch.dtype) -> None:
    weight, x = random(96, 64, dtype=dtype), random(3, 64, dtype=dtype, seed=1)
    kept = weight.clone()
    linear = cpu.make_linear(weight, None, own=False)
    assert weight.equal(kept)
    assert linear.forward(x).equal(cpu.make_linear(weight, None, own=True).forward(x))


ROWS = (1, 2, 3, 4, 11, 12, 13, 36, 37, 300)


def packed(cpu: CpuKernels, weight: Tensor) -> PackedLinear:
    """Its memory is changed."""
    return pack(lambda: cpu.library, weight, None)


def plain_panels(cpu: CpuKernels, weight: Tensor) -> PanelLinear:
    return PanelLinear.pack(lambda: cpu.library, weight.clone(), None)


def compress(cpu: CpuKernels, weight: Tensor) -> CompressedLinear:
    """Its memory is changed."""
    linear = packed(cpu, weight)
    assert isinstance(linear, CompressedLinear), "the panels are plain"
    return linear


def compressed_panels(cpu: CpuKernels, weight: Tensor) -> CompressedLinear:
    return compress(cpu, weight.clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("in_size", "out_size", "fits"),
    [(64, 96, True), (16, 32, True), (1040, 160, True), (96, 35, False), (40, 32, False)],
)
def test_weights_of_whole_vectors_are_packed(
    cpu: CpuKernels, dtype: torch.dtype, in_size: int, out_size: int, fits: bool
) -> None:
    assert fits_panels(random(out_size, in_size, dtype=dtype)) == fits


@pytest.mark.parametrize("rows", ROWS)
def test_compressed_panels_give_the_very_bits_that_plain_ones_give(cpu: CpuKernels, rows: int) -> None:
    """Eight exponents only, so that no weight is rare: those are added in another order."""
    signs, lower = random(96, 528, dtype=torch.bfloat16), random(96, 528, dtype=torch.bfloat16, seed=1).abs()
    weight = torch.copysign(0.01 + lower.clamp(max=1.0), signs)
    x = random(rows, 528, dtype=torch.bfloat16, seed=2)
    compressed, plain = compressed_panels(cpu, weight), plain_panels(cpu, weight)
    assert compressed.nbytes < 0.76 * plain.nbytes
    assert compressed.forward(x).equal(plain.forward(x))


def test_weights_of_many_exponents_keep_plain_panels(cpu: CpuKernels) -> None:
    exponents = torch.randint(-60, 60, (96, 64), generator=torch.Generator().manual_seed(3))
    weight = (random(96, 64, dtype=torch.float32) * 2.0**exponents).to(torch.bfloat16)
    linear = packed(cpu, weight.clone())
    assert isinstance(linear, PanelLinear)
    assert linear.panels.shape == (3, 64, 32)
    assert linear.forward(torch.eye(64, dtype=torch.bfloat16)).equal(weight.t() + 0.0)


def test_compression_frees_the_weight(cpu: CpuKernels) -> None:
    weight = random(96, 64, dtype=torch.bfloat16)
    view = weight[32:]
    compress(cpu, weight)
    assert view.untyped_storage().nbytes() == 0
    both = random(192, 64, dtype=torch.bfloat16)
    kept = both[96:].clone()
    compress(cpu, both[:96])
    assert both[96:].equal(kept)


def test_panels_of_another_size_or_dtype_are_refused(cpu: CpuKernels) -> None:
    for panels in (plain_panels, compressed_panels):
        linear = panels(cpu, random(96, 64, dtype=torch.bfloat16))
        for wrong in (48, 80):
            with pytest.raises(AssertionError, match="columns times panels"):
                linear.forward(random(2, wrong, dtype=torch.bfloat16))
        with pytest.raises(AssertionError, match=r"float32 times torch\.bfloat16"):
            linear.forward(random(2, 64, dtype=torch.float32))


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
        found = stacked.forward(token_ids, positions, PoolView.over(found_pool), batch, logit_rows)
        expected = one_by_one.forward(token_ids, positions, PoolView.over(expected_pool), batch, logit_rows)
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
        found = found_by.forward(token_ids, positions, PoolView.over(found_pool), batch, logit_rows)
        expected = expected_by.forward(token_ids, positions, PoolView.over(expected_pool), batch, logit_rows)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for ours, theirs in ((found, expected), (found_pool, expected_pool)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


def test_layers_of_other_sizes_are_left_to_the_ops(tmp_path: Path):
    write_random_checkpoint(tmp_path, "LlamaForCausalLM", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    assert Decoder.load(tmp_path, torch.float32, "cpu", kernels="cpu")._stack is None
