"""The linear layer of plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shared.kernels import linear
from shared.kernels.linear import PlainLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_numbers_of_rows_reach_what_keeps_something_for_each(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((2048, 32), generator=generator).to(dtype)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 32), (24,)))
    expected, real, met = functional.linear(x.float(), weight.float(), bias.float()), functional.linear, set()

    def noted(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        met.add(rows.shape[0])
        return real(rows, *rest)

    monkeypatch.setattr(linear.functional, "linear", noted)
    plain = PlainLinear(weight, bias)
    numbers = [*range(1, 600), 1000, 2047, 2048]
    for num_rows in numbers:
        y = plain.forward(x[:num_rows])
        torch.testing.assert_close(y.float(), expected[:num_rows], rtol=2e-2, atol=2e-2)
    if dtype == torch.float32:
        assert met == set(numbers)
    else:
        assert len(met) <= 8 + 7 + 4 * 5
        assert all(
            any(num_rows <= padded <= max(num_rows + 7, num_rows * 5 / 4) for padded in met) for num_rows in numbers
        )
