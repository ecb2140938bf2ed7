"""Products with weights in codes beside those of cuBLAS with 16 bits; for few rows the limit is the codes' bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.bench_case import Case
from shared.kernels.coded import launch
from shared.kernels.coded.launch import CodedConfig, CodedLinear
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import FP8, QuantizedWeight

ROWS = (1, 16, 64, 256, 2048)
SHAPES = ((4096, 28_672), (14_336, 4096))
FORMS = {
    "int4": LinearSpec("int4", 128, has_zeros=True),
    "int8": LinearSpec("int8", 0),
    "w8a8": LinearSpec("int8", 0, rounds_input=True),
    "fp8": LinearSpec("fp8", 0),
    "fp8 in blocks": LinearSpec("fp8", 128),
}
"""As `QUANTIZATION` makes them, and checkpoints of DeepSeek."""
FEW = 128
"""Rows from which on arithmetic is the limit."""


def random_linear(form: str, in_size: int, out_size: int, device: torch.device) -> CodedLinear:
    """A linear layer of random codes: times do not depend on them."""
    weight = QuantizedWeight.allocate(FORMS[form], (out_size, in_size), device)
    if weight.codes.dtype == FP8:
        weight.codes.copy_(torch.randn(in_size, device=device).expand(out_size, -1))
    else:
        weight.codes.random_()
    weight.scales.fill_(0.01)
    if weight.zeros is not None:
        weight.zeros.fill_(8)
    linear = launch.make_coded_linear(weight, None, torch.bfloat16)
    assert isinstance(linear, CodedLinear)
    return linear


def cases(
    device: torch.device, rows: Sequence[int] = ROWS, shapes: Sequence[tuple[int, int]] = SHAPES
) -> Iterator[Case]:
    """Each form at each number of rows, beside cuBLAS."""
    for in_size, out_size in shapes:
        weight = torch.randn(out_size, in_size, device=device).bfloat16()
        for count in rows:
            x = torch.randn(count, in_size, device=device).bfloat16()
            name = "coded, 16 bits by cuBLAS"
            yield _case(name, count, in_size, out_size, weight.nbytes, partial(functional.linear, x, weight))
        del weight
        for form in FORMS:
            linear = random_linear(form, in_size, out_size, device)
            for count in rows:
                x = torch.randn(count, in_size, device=device).bfloat16()
                yield _case(f"coded, {form}", count, in_size, out_size, linear.nbytes, partial(linear.forward, x))


def tuning_cases(device: torch.device) -> Iterator[Case]:
    """Tiles and splits by the number of rows, and from how many rows on it pays to open the weight first."""
    for form, (in_size, out_size) in (*product(["int4"], SHAPES), *product(["int8", "fp8"], SHAPES[:1])):
        linear = random_linear(form, in_size, out_size, device)

        def run(x: Tensor, config: CodedConfig, linear: CodedLinear = linear) -> Tensor:
            return launch.multiply(x, linear.weight, None, linear.tickets, config=config)

        for count, config in _configs():
            x = torch.randn(count, in_size, device=device).bfloat16()
            sizes = f"{config.rows} × {config.columns}, {config.num_warps} warps, {config.num_stages} stages"
            name = f"coded, {form}: {sizes}, {config.programs} a multiprocessor"
            yield _case(name, count, in_size, out_size, linear.nbytes, partial(run, x, config))
        for count in (128, 256, 512):
            x = torch.randn(count, in_size, device=device).bfloat16()
            for way, call in (
                ("in registers", partial(launch.multiply, x, linear.weight, None, linear.tickets)),
                ("opened first", partial(launch.multiply_opened, x, linear.weight, None)),
            ):
                yield _case(f"coded, {form}: {way}", count, in_size, out_size, linear.nbytes, call)


def _configs() -> Iterator[tuple[int, CodedConfig]]:
    for columns, num_warps, num_stages, programs in (
        (64, 2, 4, 5), (64, 4, 4, 5), (64, 2, 3, 5), (64, 2, 6, 6), (128, 4, 3, 2), (128, 4, 4, 6), (128, 8, 4, 4),
    ):  # fmt: skip
        yield 1, CodedConfig(16, columns, num_warps, num_stages, programs)
    for columns, num_warps, num_stages, programs in (
        (64, 4, 3, 4), (128, 4, 3, 2), (128, 8, 3, 2), (128, 4, 4, 3), (256, 8, 3, 2),
    ):  # fmt: skip
        yield 64, CodedConfig(64, columns, num_warps, num_stages, programs)
    for rows, columns, num_warps in ((64, 128, 4), (64, 128, 8), (128, 128, 8), (128, 64, 4), (256, 128, 8)):
        yield 256, CodedConfig(rows, columns, num_warps, 3, 2 if rows == 64 else 1)


def _case(name: str, rows: int, in_size: int, out_size: int, weight_bytes: int, run: Callable[[], object]) -> Case:
    num_bytes = weight_bytes + 2 * rows * (in_size + out_size)
    flops = 2 * rows * in_size * out_size if rows > FEW else 0
    return Case(name, f"{rows} × {in_size} × {out_size}", run, num_bytes, flops)
