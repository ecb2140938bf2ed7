"""Triton's products with weights in codes: interpreted against torch, their PTX by the bit, and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernels.coded.layout import step_columns
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.opened import OpenedLinear
from shared.kernels.quantized import FP8, QuantizedWeight

from . import coded_checks, compiling, ptx
from .comparing import triton_kernels
from .compiling import TARGETS
from .conftest import Run
from .test_triton_compiles import MATRIX_INSTRUCTIONS

DTYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", coded_checks.FORMS)
def test_products_equal_those_of_the_opened_weight(interpreted: Run, form: str, dtype: torch.dtype) -> None:
    interpreted(coded_checks.check_product, form, 5, 70, 200, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("form", coded_checks.FORMS)
@pytest.mark.parametrize(("num_rows", "sizes"), [(1, (8, 128)), (17, (136, 1152)), (70, (300, 900)), (0, (64, 64))])
def test_sizes_that_fill_no_tile_and_sums_in_splits(
    interpreted: Run, form: str, num_rows: int, sizes: tuple[int, int]
) -> None:
    interpreted(coded_checks.check_product, form, num_rows, *sizes, dtype=torch.float16, bias=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [form for form in coded_checks.FORMS if "rounded" not in form])
def test_a_weight_is_opened_whole_and_in_parts(interpreted: Run, form: str, dtype: torch.dtype) -> None:
    interpreted(coded_checks.check_the_opened_weight, form, dtype)


@pytest.mark.parametrize("form", ["int4 groups with zeros", "fp8 blocks"])
def test_many_rows_are_multiplied_by_the_opened_weight(interpreted: Run, form: str) -> None:
    interpreted(coded_checks.check_product, form, 257, 70, 200)
    interpreted(coded_checks.check_many_rows, form)


def test_columns_in_the_order_of_their_groups(interpreted: Run) -> None:
    interpreted(coded_checks.check_orders)


def test_rows_that_are_no_numbers_harm_no_other(interpreted: Run) -> None:
    interpreted(coded_checks.check_rows_that_are_no_numbers, torch.float16)


@pytest.mark.parametrize(
    ("kind", "group", "columns"),
    [
        ("int4", 0, 128), ("int4", 32, 128), ("int4", 64, 128), ("int4", 256, 128), ("int4", 16, 64), ("int4", 192, 64),
        ("int8", 0, 128), ("int8", 128, 128), ("int8", 64, 128), ("int8", 32, 64), ("fp8", 16, 32),
        ("int4", 24, None), ("int8", 8, None), ("fp8", 100, None),
    ],
)  # fmt: skip
def test_a_step_has_whole_groups_or_is_part_of_one(kind: str, group: int, columns: int | None) -> None:
    assert step_columns(kind, group) == columns


def kinds_of_layers() -> list[type]:
    """For groups of 24 columns, and of parts in different orders."""
    odd = QuantizedWeight.allocate(LinearSpec("int4", 24), (64, 96), "cpu")
    spec = LinearSpec("int4", 32, has_zeros=True, index_groups=2)
    ordered = QuantizedWeight.allocate(spec, (64, 64), "cpu", part_rows=(32, 32))
    index = torch.arange(64, dtype=torch.int32) // 32
    ordered = replace(ordered, index=torch.stack([index, index.flip(0)]))
    return [type(triton_kernels().make_quantized_linear(weight, None, torch.float32)) for weight in (odd, ordered)]


def test_other_groups_are_opened_by_torch(interpreted: Run) -> None:
    assert interpreted(kinds_of_layers) == [OpenedLinear, OpenedLinear]


def texts(name: str) -> list[str]:
    from shared.kernels.coded import open_jit

    return list(getattr(open_jit, name).value)


@pytest.mark.parametrize(
    ("suffix", "dtype", "base"), [("BF16", torch.bfloat16, 128.0), ("FP16", torch.float16, 1024.0)]
)
def test_the_instructions_open_every_code(interpreted: Run, suffix: str, dtype: torch.dtype, base: float) -> None:
    nibbles, whole, floats = (interpreted(texts, f"{name}_{suffix}") for name in ("NIBBLES", "BYTES", "FLOATS"))
    for zero in (0, 8, 16):
        less = ptx.joined(torch.tensor([-base - zero] * 2).to(dtype))
        for part, text in enumerate(nibbles):
            for code in range(16):
                word = 0xFFFFFFFF ^ (0xF000F << 4 * part) | (code | (15 - code) << 16) << 4 * part
                found = ptx.halves(ptx.run(text, word, less), dtype)
                assert found.tolist() == [code - zero, 15 - code - zero]
    for part, (text, of_float) in enumerate(zip(whole, floats, strict=True)):
        for code in range(256):
            other = 255 - code
            word = 0xFFFFFFFF ^ (0xFF00FF << 8 * part) | (code | other << 16) << 8 * part
            pair = torch.tensor([code, other], dtype=torch.uint8)
            assert ptx.halves(ptx.run(text, word), dtype).tolist() == pair.view(torch.int8).tolist()
            if {code & 127, other & 127}.isdisjoint({127}):  # that is no number
                assert ptx.halves(ptx.run(of_float, word), dtype).float().equal(pair.view(FP8).float())


FEW_BYTES = 64  # of stack: sm_89 spills 8 with Triton 3.9; on an H200 larger tiles were faster though they spill 56
COMPILED = (
    "int4 groups", "int4 groups with zeros", "int4 small groups", "int8 rows", "int8 groups", "int8 rows, rounded rows",
    "fp8 blocks",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [
    ("sm_80", torch.bfloat16), ("sm_89", torch.bfloat16), ("sm_90", torch.bfloat16), ("sm_90", torch.float16),
    ("gfx942", torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("form", COMPILED)
def test_products_compile_and_use_the_matrix_units_without_spills(
    compiled: Run, form: str, dtype: torch.dtype, arch: str
) -> None:
    kernels = compiled(compiling.compile_coded, form, dtype, arch)
    products = [kernel for kernel in kernels if kernel.name == "multiply_codes"]
    assert len(products) >= 3
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels)
    assert all(kernel.stack_bytes <= FEW_BYTES for kernel in kernels)
    assert not any(kernel.spilled_registers for kernel in kernels)
    assert all(kernel.num_matrix_instructions > 0 for kernel in products)
    if arch == "sm_90":
        # The fewest rows of int4 are multiplied by two warps, too few for a warpgroup.
        fewest = 1 if form.startswith("int4") else 0
        assert sum(MATRIX_INSTRUCTIONS[arch] in kernel.code for kernel in products) >= len(products) - fewest
