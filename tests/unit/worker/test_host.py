"""What a worker's dtypes may be."""

from __future__ import annotations

import pytest
import torch

from services.worker.host import DTYPES, choose_kv_dtype
from shared.errors import ConfigError


@pytest.mark.parametrize("compute", DTYPES.values())
def test_the_kv_is_kept_as_it_is_computed_unless_said(compute: torch.dtype) -> None:
    assert choose_kv_dtype("auto", compute) == compute


def test_bf16_kv_goes_with_fp32_and_with_bf16() -> None:
    assert choose_kv_dtype("bf16", torch.float32) == torch.bfloat16
    assert choose_kv_dtype("bf16", torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(("wanted", "compute"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16")])
def test_a_pair_that_no_kernel_serves_is_refused_by_name(wanted: str, compute: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype {wanted} is not supported .* only auto or {compute}") as caught:
        choose_kv_dtype(wanted, DTYPES[compute])
    assert caught.value.field == "kv_dtype"
