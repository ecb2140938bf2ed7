"""Panels of bf16 weights: compressed ones hold what plain ones hold, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.backends.cpu import CpuKernels
from shared.kernels.cpu.linear import CompressedLinear, PackedLinear, PanelLinear, fits_panels, pack

from .cpu_case import DTYPES, close, random, uneven_weight
from .isas import EACH_ISA, needs_library

pytestmark = needs_library

ROWS = (1, 2, 3, 4, 11, 12, 13, 36, 37, 300)


@pytest.fixture(scope="module", params=EACH_ISA)
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


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


@pytest.mark.parametrize("rows", ROWS)
def test_rare_weights_of_compressed_panels_are_multiplied_too(cpu: CpuKernels, rows: int) -> None:
    weight = uneven_weight()
    x = random(rows, 1040, dtype=torch.bfloat16, seed=2)
    close(compressed_panels(cpu, weight).forward(x), (x.double() @ weight.double().t()).to(x.dtype))


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
