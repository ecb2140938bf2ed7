"""KV kept in bf16 beside fp32 computation: rounded once when written, read as it was rounded, by every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels.backend import DecoderOps
from shared.kernels.backends import cpu as cpu_backend
from shared.kernels.cpu.layer_stack import CpuLayerStack
from shared.kernels.torch_backend import TorchKernels
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder

from . import attention_checks, comparing, decoder_checks
from .attention_case import LAYER, AttentionCase
from .conftest import Run
from .isas import EACH_ISA, needs_library
from .test_cpu_linear import ENDS, WINDOWED, pool, step

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = [(1, 1), (9, 9), (1, 37), (4, 70), (2, 2), (1, 16), (70, 130)]
PLACEMENTS = [((4, 2), 64, False), ((6, 1), 128, True), ((3, 3), 32, True)]


@pytest.fixture(params=["torch", *EACH_ISA])
def kernels(request: pytest.FixtureRequest) -> DecoderOps:
    return TorchKernels() if request.param == "torch" else cpu_backend.CpuKernels(request.param)


def placed(
    kernels: DecoderOps, kv_dtype: torch.dtype, heads: tuple[int, int], head_dim: int, norms: bool
) -> list[Tensor]:
    """[the placed query, the pool] of some random tokens."""
    num_heads, num_kv_heads = heads
    query, key, value = (
        comparing.random_tensor(7, count, head_dim, dtype=FP32, device="cpu", seed=seed)
        for seed, count in enumerate((num_heads, num_kv_heads, num_kv_heads))
    )
    angles = comparing.random_tensor(7, head_dim // 2, dtype=FP32, device="cpu").repeat(1, 2)
    norm = comparing.random_tensor(head_dim, dtype=FP32, device="cpu") if norms else None
    kv_blocks = torch.zeros(3, 2, 2, num_kv_heads, 16, head_dim, dtype=kv_dtype)
    slots = torch.tensor([0, 47, 5, 16, 31, 40, 1])
    query = kernels.rotate_and_write(
        query, key, value, angles.cos(), angles.sin(), kv_blocks, 1, slots, q_norm=norm, k_norm=norm, eps=1e-6
    )
    return [query, kv_blocks]


@pytest.mark.parametrize(("heads", "head_dim", "norms"), PLACEMENTS)
def test_what_is_written_is_rounded_once(
    kernels: DecoderOps, heads: tuple[int, int], head_dim: int, norms: bool
) -> None:
    query, narrow = placed(kernels, BF16, heads, head_dim, norms)
    same_query, wide = placed(kernels, FP32, heads, head_dim, norms)
    assert torch.equal(query, same_query)
    assert torch.equal(narrow, wide.to(BF16))
    assert bool(narrow.any())


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((21, 3), 80), ((8, 2), 24)])
def test_attention_reads_what_was_written(
    kernels: DecoderOps, window: int | None, heads: tuple[int, int], head_dim: int
) -> None:
    case = AttentionCase(MIXED, heads, head_dim, block_size=16, kv_dtype=BF16)
    assert case.kv_blocks.dtype == BF16
    found = kernels.paged_attention(case.query, case.kv_blocks, LAYER, case.batch, scale=0.1, window=window)
    assert found.dtype == FP32
    torch.testing.assert_close(found.double(), case.expected(window, 0.1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "window"), [(64, 2, None), (80, 3, 9), (128, 1, None)])
def test_triton_reads_what_was_written(interpreted: Run, head_dim: int, group: int, window: int | None) -> None:
    interpreted(
        attention_checks.check_attention, MIXED[:-1], heads=(group, 1), head_dim=head_dim, block_size=16, kv_dtype=BF16,
        window=window,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "head_dim", "norms"), PLACEMENTS)
def test_triton_writes_in_the_dtype_of_the_pool(
    interpreted: Run, heads: tuple[int, int], head_dim: int, norms: bool
) -> None:
    """To the tolerance of bf16 and no closer: the interpreter cuts off where a GPU rounds."""
    interpreted(
        decoder_checks.check_rotate_and_write, num_tokens=3, heads=heads, head_dim=head_dim, block_size=16, norms=norms,
        kv_dtype=BF16,
    )  # fmt: skip


@needs_library
@pytest.mark.parametrize("rows", [ENDS, [3, 20, 39]], ids=str)
@pytest.mark.parametrize(("architecture", "extra"), [("LlamaForCausalLM", {}), ("Qwen3ForCausalLM", WINDOWED)])
def test_all_layers_in_one_call_give_what_the_ops_give(tmp_path: Path, architecture, extra, rows):
    write_random_checkpoint(
        tmp_path, architecture, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, extra_config=extra
    )
    stacked = Decoder.load(tmp_path, FP32, "cpu", kernels="cpu")
    assert isinstance(stacked._stack, CpuLayerStack)
    token_ids, positions, batch = step()
    found_pool, expected_pool = pool(stacked).to(BF16), pool(stacked).to(BF16)
    with torch.inference_mode():
        found, expected = (
            decoder.forward(token_ids, positions, blocks, batch, torch.tensor(rows))
            for decoder, blocks in ((stacked, found_pool), (stacked.op_by_op(stacked.kernels), expected_pool))
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert torch.equal(found_pool, expected_pool)


@pytest.mark.parametrize(("compute", "kv"), [(BF16, FP32), (FP32, FP16), (FP16, BF16)])
def test_other_pairs_of_dtypes_are_refused(kernels: DecoderOps, compute: torch.dtype, kv: torch.dtype) -> None:
    case = AttentionCase([(1, 5)], (4, 2), 64, block_size=16, dtype=compute, kv_dtype=compute)
    with pytest.raises(AssertionError, match=f"KV in {kv} beside {compute}"):
        kernels.paged_attention(case.query, case.kv_blocks.to(kv), LAYER, case.batch, scale=1.0, window=None)
