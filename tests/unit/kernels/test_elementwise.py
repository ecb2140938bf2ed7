"""Norms, rotation, activation and the KV write against the formulas that transformers uses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from shared.kernels.activation.reference import silu_mul
from shared.kernels.rmsnorm.reference import add_rms_norm, rms_norm
from shared.kernels.rotary.reference import rotate, write_kv

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
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_rounds_exactly_like_transformers(dtype: torch.dtype) -> None:
    query, key = _random(5, 4, 8, dtype=dtype), _random(5, 2, 8, dtype=dtype)
    angles = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    assert all(map(torch.equal, (rotate(query, cos, sin), rotate(key, cos, sin)), expected))


def test_silu_mul_takes_the_gate_first() -> None:
    gate_up = _random(3, 10, dtype=torch.float32)
    expected = functional.silu(gate_up[:, :5]) * gate_up[:, 5:]
    assert torch.equal(silu_mul(gate_up), expected)


def test_write_kv_fills_its_slots_of_its_layer_and_nothing_else() -> None:
    kv_blocks = torch.zeros(6, 2, 2, 3, 4, 8)
    qkv = _random(5, 9 * 8, dtype=torch.float32)
    key, value = (part.view(5, 3, 8) for part in (qkv[:, 24:48], qkv[:, 48:]))
    slots = torch.tensor([23, 0, 7, 8, 15])
    write_kv(key, value, kv_blocks, 1, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(kv_blocks[slot // 4, 1, 0, :, slot % 4], key[row])
        assert torch.equal(kv_blocks[slot // 4, 1, 1, :, slot % 4], value[row])
    assert int((kv_blocks != 0).sum()) == key.numel() + value.numel()
