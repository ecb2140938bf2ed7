"""Linear layers of the C++ kernels, with every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.backends.cpu import CpuKernels

from .cpu_case import DTYPES, close, random
from .isas import EACH_ISA, needs_library

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


@settings(max_examples=40)  # for each packing
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
