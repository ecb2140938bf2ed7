"""What a worker's dtypes and kernels may be."""

from __future__ import annotations

import pytest
import torch

from services.worker.host import DTYPES, choose_backend, choose_kv_dtype
from services.worker.settings import WorkerSettings
from shared.config import load_settings
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


def settings(*flags: str) -> WorkerSettings:
    return load_settings(WorkerSettings, ["--name", "w", "--model", "folder", *flags])


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ((), "auto"),
        (("--kernels", "cpu"), "cpu"),
        (("--cpu-isa", "avx2"), "cpu:avx2"),
        (("--cpu-isa", "avx512", "--kernels", "cpu"), "cpu:avx512"),
        (("--cpu-isa", "torch"), "torch"),
        (("--cpu-isa", "avx2", "--kernels", "torch"), "torch"),
        (("--cpu-isa", "avx2", "--device", "cuda"), "auto"),
    ],
)
def test_the_instruction_set_names_the_backend(monkeypatch: pytest.MonkeyPatch, flags, backend) -> None:
    for name in ("CPU_ISA", "TANDEM_CPU_ISA", "TANDEM_WORKER_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert choose_backend(settings(*flags)) == backend


def test_the_environment_names_the_instruction_set_and_a_flag_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CPU_ISA", "avx2")
    assert settings().cpu_isa == "avx2"
    assert settings("--cpu-isa", "auto").cpu_isa == "auto"
    monkeypatch.setenv("TANDEM_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"cpu_isa.*'mmx'"):
        settings()
