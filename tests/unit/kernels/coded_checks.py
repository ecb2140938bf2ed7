"""Triton's products with weights in codes against torch's with the opened weights, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shared.kernels.linear_spec import LinearSpec
from shared.kernels.opened import rounded_input
from shared.kernels.quantized import QuantizedWeight, quantize_rows, rounded

from .comparing import TOLERANCES, random_tensor, triton_kernels

FORMS = {
    "int4 groups": LinearSpec("int4", 128),
    "int4 groups with zeros": LinearSpec("int4", 64, has_zeros=True),
    "int4 small groups": LinearSpec("int4", 32, has_zeros=True),
    "int4 rows": LinearSpec("int4", 0),
    "int4 rows with zeros": LinearSpec("int4", 0, has_zeros=True),
    "int4 groups, rounded rows": LinearSpec("int4", 64, rounds_input=True),
    "int8 groups": LinearSpec("int8", 32),
    "int8 groups with zeros": LinearSpec("int8", 128, has_zeros=True),
    "int8 rows": LinearSpec("int8", 0),
    "int8 rows with zeros": LinearSpec("int8", 0, has_zeros=True),
    "int8 rows, rounded rows": LinearSpec("int8", 0, rounds_input=True),
    "fp8 rows": LinearSpec("fp8", 0),
    "fp8 blocks": LinearSpec("fp8", 128),
    "small fp8 blocks": LinearSpec("fp8", 32),
}


def random_weight(spec: LinearSpec, out_size: int, in_size: int, device: str, seed: int = 0) -> QuantizedWeight:
    """With every code; in groups of whole columns or with a last one that is not."""
    weight = QuantizedWeight.allocate(spec, (out_size, in_size), "cpu")
    generator = torch.Generator().manual_seed(seed)
    weight.codes.view(torch.uint8).random_(0, 256, generator=generator)
    if spec.kind == "fp8":  # these are no numbers
        bits = weight.codes.view(torch.uint8)
        bits[bits & 127 == 127] = 0x7E
        weight.codes[:, ::2].copy_(torch.randn(out_size, len(range(0, in_size, 2)), generator=generator))
    weight.scales.uniform_(0.5, 1.5, generator=generator)
    weight.scales.mul_({"int4": 0.2, "int8": 0.02, "fp8": 0.02}[spec.kind])
    if weight.zeros is not None:
        least, most = (0, 17) if spec.kind == "int4" else (-128, 128)
        weight.zeros.random_(least, most, generator=generator)
    return moved(weight, device)


def moved(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    parts = {name: getattr(weight, name) for name in ("codes", "scales", "zeros", "index")}
    return replace(weight, **{name: part if part is None else part.clone().to(device) for name, part in parts.items()})


def check_product(
    form: str,
    num_rows: int,
    out_size: int,
    in_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
) -> None:
    """A layer of these sizes, called twice: it leaves no trace of a call."""
    from shared.kernels.coded.launch import MOST_ROWS, CodedLinear

    spec = FORMS[form]
    weight = random_weight(spec, out_size, in_size, device)
    opened = weight.dense().double()
    b = random_tensor(out_size, dtype=dtype, device=device, seed=2) if bias else None
    linear = triton_kernels().make_quantized_linear(weight, b, dtype)
    assert isinstance(linear, CodedLinear)
    assert (linear.in_size, linear.out_size, linear.dtype) == (in_size, out_size, dtype)
    x = random_tensor(num_rows, in_size, dtype=dtype, device=device, seed=1)
    expected = rounded_input(x, spec).double() @ opened.t() + (0 if b is None else b.double())
    for _ in range(2):
        assert_close(linear.forward(x), expected, rounds_weight=num_rows > MOST_ROWS)


def check_orders(dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """Columns of a group anywhere."""
    from shared.kernels.coded.launch import CodedLinear
    from shared.kernels.ordered import OrderedLinear

    spec = LinearSpec("int4", 32, has_zeros=True, index_groups=4)
    weight = QuantizedWeight.allocate(spec, (70, 128), "cpu")
    piece = quantize_rows(random_tensor(70, 128, dtype=torch.float32, device="cpu"), replace(spec, index_groups=0))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    weight.fill(0, replace(piece, index=(torch.arange(128) // 32)[order]))
    weight = moved(weight, device)
    opened, x = weight.dense().double(), random_tensor(5, 128, dtype=dtype, device=device)
    linear = triton_kernels().make_quantized_linear(weight, None, dtype)
    assert isinstance(linear, OrderedLinear)
    assert isinstance(linear.inner, CodedLinear)
    assert_close(linear.forward(x), x.double() @ opened.t())


def check_many_rows(form: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """A weight that is opened in several parts."""
    from shared.kernels.coded import launch
    from shared.kernels.coded.layout import CodedWeight

    weight = random_weight(FORMS[form], 200, 128, device)
    opened = weight.dense().double()
    coded = CodedWeight.lay_out(weight)
    x = random_tensor(9, 128, dtype=dtype, device=device)
    kept, launch.MOST_OPENED = launch.MOST_OPENED, 128 * 128 * dtype.itemsize
    try:
        for bias in (None, random_tensor(200, dtype=dtype, device=device)):
            expected = x.double() @ opened.t() + (0 if bias is None else bias.double())
            assert_close(launch.multiply_opened(x, coded, bias), expected, rounds_weight=True)
    finally:
        launch.MOST_OPENED = kept


def check_capture(form: str) -> None:
    """Few rows and many in CUDA graphs, replayed with other numbers."""
    weight = random_weight(FORMS[form], 512, 4096, "cuda")
    opened = weight.dense().double()
    linear = triton_kernels().make_quantized_linear(weight, None, torch.bfloat16)
    for num_rows in (4, 300):
        x = random_tensor(num_rows, 4096, dtype=torch.bfloat16, device="cuda")
        linear.forward(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear.forward(x)
        for seed in (1, 2):
            x.copy_(random_tensor(num_rows, 4096, dtype=torch.bfloat16, device="cuda", seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            expected = rounded_input(x, FORMS[form]).double() @ opened.t()
            assert_close(found, expected, rounds_weight=num_rows > 256)


def check_rows_that_are_no_numbers(dtype: torch.dtype, device: str = "cpu") -> None:
    """They harm no other row."""
    spec = LinearSpec("int8", 0, rounds_input=True)
    weight = rounded(random_tensor(64, 128, dtype=torch.float32, device=device), spec)
    linear = triton_kernels().make_quantized_linear(weight, None, dtype)
    x = random_tensor(9, 128, dtype=dtype, device=device, seed=1)
    x[4] = 0
    expected = linear.forward(x)
    for damage in (float("nan"), float("inf"), -float("inf")):
        harmed = x.clone()
        harmed[3, 77] = damage
        found = linear.forward(harmed)
        assert bool(found[3].isnan().all())
        others = [row for row in range(9) if row != 3]
        assert found[others].equal(expected[others])


def assert_close(found: Tensor, expected: Tensor, *, rounds_weight: bool = False) -> None:
    """Rounded once, but for fp32 sums: to the dtype; where the weight is rounded too, sums differ by as much again."""
    unit = TOLERANCES[torch.float32] if found.dtype == torch.float32 else torch.finfo(found.dtype).eps
    size = float(expected.square().sum().sqrt()) / max(1, expected.numel()) ** 0.5
    most = unit * size * (0.1 if found.dtype != torch.float32 else 1)  # of sums that cancel
    if rounds_weight and found.dtype != torch.float32:
        most = unit * size * 2
    torch.testing.assert_close(found.double(), expected, rtol=unit, atol=most)


def check_the_opened_weight(form: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every row and column, of a part too: for many rows of x it is multiplied by torch."""
    from shared.kernels.coded.launch import open_weight
    from shared.kernels.coded.layout import CodedWeight

    weight = random_weight(FORMS[form], 150, 200, device)
    opened = weight.dense()
    coded = CodedWeight.lay_out(weight)
    assert open_weight(coded, 0, 150, dtype).equal(opened.to(dtype))
    assert open_weight(coded, 64, 150, dtype).equal(opened[64:].to(dtype))
