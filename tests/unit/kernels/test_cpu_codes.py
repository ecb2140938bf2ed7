"""Weights in codes with every instruction set: as torch opens them, and each row by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernels.backends.cpu import CpuKernels
from shared.kernels.cpu.coded import CodedLinear
from shared.kernels.cpu.experts import PackedExperts
from shared.kernels.experts.reference import PlainExperts
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.opened import OpenedLinear, rounded_input
from shared.kernels.ordered import OrderedLinear
from shared.kernels.quantized import QuantizedWeight, quantize_rows, rounded

from .cpu_case import DTYPES, close, random
from .isas import EACH_ISA, SUMS, needs_library

pytestmark = needs_library

FORMS = {
    "int8 rows": (LinearSpec("int8", 0), 96, 1040),
    "int8 groups": (LinearSpec("int8", 32), 64, 128),
    "int4 groups": (LinearSpec("int4", 128), 64, 1024),
    "int4 with zeros": (LinearSpec("int4", 16, has_zeros=True), 96, 688),
    "int4 of whole tiles with zeros": (LinearSpec("int4", 64, has_zeros=True), 96, 512),
    "int4 rows with zeros": (LinearSpec("int4", 0, has_zeros=True), 32, 1040),
    "int8 rows longer than are opened at once": (LinearSpec("int8", 0), 64, 8720),
    "int4 with lows": (LinearSpec("int4", 32, has_zeros=True, has_lows=True), 96, 1088),
    "int8 short groups": (LinearSpec("int8", 16), 96, 1088),
    "int4 short groups with lows": (LinearSpec("int4", 16, has_zeros=True, has_lows=True), 64, 544),
    "int4 groups in rows as long": (LinearSpec("int4", 16, has_zeros=True), 64, 8720),
}
"""Name → form, rows, columns."""
ROUNDED_FORMS = {
    "int8 rows": (LinearSpec("int8", 0, rounds_input=True), 96, 2128),
    "int8 rows of whole tiles": (LinearSpec("int8", 0, rounds_input=True), 160, 4224),
    "int8 groups": (LinearSpec("int8", 32, rounds_input=True), 64, 128),
    "int4 groups": (LinearSpec("int4", 128, rounds_input=True), 64, 1024),
    "int4 with zeros": (LinearSpec("int4", 16, has_zeros=True, rounds_input=True), 96, 688),
    "int4 of whole tiles with zeros": (LinearSpec("int4", 64, has_zeros=True, rounds_input=True), 192, 512),
}
"""Likewise, of weights whose rows of x are rounded too."""


@pytest.fixture(scope="module", params=EACH_ISA)
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_codes_give_the_products_of_the_opened_weight_and_rows_do_not_depend_on_each_other(cpu, dtype, form):
    spec, out_size, in_size = FORMS[form]
    weight = rounded(random(out_size, in_size, dtype=torch.float32), spec)
    opened, bias = weight.dense(), random(out_size, dtype=dtype, seed=2)
    linear = cpu.make_quantized_linear(weight, bias, dtype)
    assert isinstance(linear, CodedLinear)
    x = random(520, in_size, dtype=dtype, seed=1)  # codes of a panel are opened for 512 rows at a time
    found = linear.forward(x)
    close(found, (x.double() @ opened.double().t() + bias.double()).to(dtype))
    # In tiles more rows than 5 are multiplied, and the codes of short groups are scaled for more than 32.
    has_tiles = SUMS[cpu.isa] == "tiles" and dtype == torch.bfloat16
    most_apart = (32 if spec.group and spec.group % 32 == 0 else 5) if has_tiles else 0
    for first, last in ((0, 1), (3, 5), (7, 20), (0, 36), (11, 60), (5, 190), (0, 513)):
        some = linear.forward(x[first:last].contiguous())
        if 5 < last - first <= most_apart:
            assert some.equal(linear.forward(x[:32].contiguous())[first:last])
        if last - first <= most_apart:
            close(some, found[first:last])
        else:
            assert some.equal(found[first:last])


@pytest.mark.parametrize("form", ROUNDED_FORMS)
def test_rounded_rows_give_exact_sums_of_products(cpu, form):
    spec, out_size, in_size = ROUNDED_FORMS[form]
    weight = rounded(random(out_size, in_size, dtype=torch.float32), spec)
    expected = OpenedLinear(weight, random(out_size, dtype=torch.bfloat16, seed=2), torch.bfloat16)
    opened, bias = weight.dense().double(), expected.bias
    x = random(600, in_size, dtype=torch.bfloat16, seed=1)
    x[4] = 0
    x[5] *= 1e30
    wide = rounded_input(x, spec).double() @ opened.t()
    linear = cpu.make_quantized_linear(weight, bias, torch.bfloat16)
    assert isinstance(linear, CodedLinear)
    assert linear.form & 32
    found = linear.forward(x)
    close(found[:5], (wide[:5] + bias.double()).bfloat16())
    close(found[6:], (wide[6:] + bias.double()).bfloat16())
    torch.testing.assert_close(found[5].float(), wide[5].bfloat16().float())
    for first, last in ((0, 1), (3, 5), (7, 20), (0, 36), (11, 60)):
        assert linear.forward(x[first:last].contiguous()).equal(found[first:last])


def test_the_largest_codes_do_not_saturate(cpu):
    spec = LinearSpec("int8", 0, rounds_input=True)
    weight = QuantizedWeight.allocate(spec, (32, 4096), "cpu")
    weight.codes.fill_(-128)
    weight.codes[1::2] = 127
    weight.scales.fill_(1.0)
    x = torch.full((8, 4096), 127.0).bfloat16()
    x[1] *= -1
    expected = x.double() @ weight.codes.double().t()
    found = cpu.make_quantized_linear(weight, None, torch.bfloat16).forward(x)
    assert found.equal(expected.bfloat16())


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_gives_none_and_harms_no_other(cpu, damage):
    weight = rounded(random(32, 128, dtype=torch.float32), LinearSpec("int8", 0, rounds_input=True))
    linear = cpu.make_quantized_linear(weight, None, torch.bfloat16)
    x = random(9, 128, dtype=torch.bfloat16, seed=1)
    expected = linear.forward(x)
    x[3, 77] = damage
    found = linear.forward(x)
    assert bool(found[3].isnan().all())
    others = [row for row in range(9) if row != 3]
    assert found[others].equal(expected[others])


def test_rows_in_fp32_are_not_rounded(cpu):
    spec = LinearSpec("int8", 0, rounds_input=True)
    weight = rounded(random(32, 128, dtype=torch.float32), spec)
    opened, x = weight.dense(), random(9, 128, dtype=torch.float32, seed=1)
    close(cpu.make_quantized_linear(weight, None, torch.float32).forward(x), x @ opened.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_lows", [False, True])
def test_int8_codes_with_zeros_of_all_values(cpu, has_lows, dtype):
    weight = QuantizedWeight.allocate(LinearSpec("int8", 32, has_zeros=True, has_lows=has_lows), (32, 256), "cpu")
    weight.codes.copy_(torch.arange(-128, 128, dtype=torch.int8).roll(5))
    weight.scales.copy_(random(32, 8, dtype=torch.float32).abs() + 0.1)
    assert weight.zeros is not None
    weight.zeros.copy_(torch.arange(-128, 128).view(32, 8))
    if has_lows:
        weight.zeros.mul_(0.37)
        weight.scales[5] = 0.0  # a group of which all numbers are its low
    opened, x = weight.dense(), random(70, 256, seed=1, dtype=dtype)
    linear = cpu.make_quantized_linear(weight, None, dtype)
    assert isinstance(linear, CodedLinear)
    expected = (x.double() @ opened.double().t()).to(dtype)
    close(linear.forward(x), expected)
    close(linear.forward(x[:3].contiguous()), expected[:3])


def test_ordered_columns(cpu):
    spec = LinearSpec("int4", 32, has_zeros=True, index_groups=4)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    plain = quantize_rows(random(64, 128, dtype=torch.float32), LinearSpec("int4", 32, has_zeros=True))
    weight = QuantizedWeight.allocate(spec, (64, 128), "cpu")
    weight.fill(0, plain.columns(0, 128))
    assert weight.index is not None
    weight.index.copy_((torch.arange(128) // 32)[order])
    opened, x = weight.dense(), random(5, 128, seed=1, dtype=torch.float32)
    linear = cpu.make_quantized_linear(weight, None, torch.float32)
    assert isinstance(linear, OrderedLinear)
    close(linear.forward(x), x @ opened.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds_input", [False, True])
@pytest.mark.parametrize("form", ["int8 groups", "int4 with zeros"])
def test_experts(cpu, dtype, form, rounds_input):
    spec = replace(FORMS[form][0], rounds_input=rounds_input)
    gate_up, down = (
        QuantizedWeight.allocate(spec, (3, rows, columns), "cpu") for rows, columns in ((128, 96), (96, 64))
    )
    for weight, seed in ((gate_up, 0), (down, 1)):
        for expert in range(3):
            _, rows, columns = weight.shape
            weight[expert].fill(
                0, quantize_rows(random(rows, columns, seed=10 * seed + expert, dtype=torch.float32), spec)
            )
    x, weights = random(9, 96, dtype=dtype, seed=3), random(9, 2, seed=4, dtype=torch.float32).abs()
    ids = torch.stack([torch.arange(9) % 3, (torch.arange(9) + 1) % 4], 1)
    expected = PlainExperts(gate_up, down, 0).forward(x, ids, weights)
    made = cpu.make_quantized_experts(gate_up, down, 0, dtype)
    assert isinstance(made, PackedExperts)
    close(made.forward(x, ids, weights), expected)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [(LinearSpec("fp8", 0), (32, 64)), (LinearSpec("int8", 8), (32, 64)), (LinearSpec("int4", 0), (33, 64))],
)
def test_what_the_kernels_do_not_read_is_opened_by_torch(cpu, spec, shape):
    weight = rounded(random(*shape, dtype=torch.float32), spec)
    linear = cpu.make_quantized_linear(weight, None, torch.float32)
    assert isinstance(linear, OpenedLinear)
    x = random(2, shape[1], dtype=torch.float32)
    close(linear.forward(x), x @ weight.dense().t())
