"""The backend that serves a device, and the errors of those that do not."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest
import torch

from shared.errors import ConfigError
from shared.kernels.backends import registry
from shared.kernels.backends.registry import Backend, choose_kernels
from shared.kernels.device import DeviceLimits
from shared.kernels.torch_backend import TorchKernels

from .conftest import Run

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def test_auto_never_interprets() -> None:
    assert choose_kernels("cpu", torch.float32).name != "triton"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"must be one of auto, triton, .*torch, not 'cuda'") as caught:
        choose_kernels("cpu", torch.float32, "cuda")
    assert caught.value.field == "kernels"


@needs_triton
def test_triton_is_refused_on_a_cpu_without_its_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"cpu is not a CUDA device"):
        choose_kernels("cpu", torch.float32, "triton")


def test_triton_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton is not installed"):
        choose_kernels("cpu", torch.float32, "triton")


def refuse_bfloat16_while_interpreting() -> str:
    assert choose_kernels("cpu", torch.float32, "triton").name == "triton"
    with pytest.raises(ConfigError) as caught:
        choose_kernels("cpu", torch.bfloat16, "triton")
    return str(caught.value)


def test_the_interpreter_is_refused_for_bfloat16(interpreted: Run) -> None:
    assert "bfloat16" in interpreted(refuse_bfloat16_while_interpreting)


@needs_triton
def test_a_gpu_with_too_little_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    for shared_bytes, expected in ((64 * 1024, "needs 101376"), (99 * 1024, None)):
        limits = DeviceLimits("sm_89", shared_bytes, num_multiprocessors=58)
        monkeypatch.setattr(registry, "device_limits", lambda device, limits=limits: limits)
        (triton,) = (backend for backend in registry.backends() if backend.name == "triton")
        reason = triton.refusal(torch.device("cuda"), torch.bfloat16)
        assert (reason is None) if expected is None else (reason is not None and expected in reason)


def test_auto_passes_over_who_refuses_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    picky = Backend("picky", ("cpu",), lambda _device, _dtype: "it is raining", TorchKernels)
    plain = Backend("plain", ("cpu",), lambda _device, _dtype: None, TorchKernels)
    monkeypatch.setattr(registry, "backends", lambda: (picky, plain))
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("cpu", torch.float32).name in ("cpu", "torch")
    assert "'picky' passed over for cpu: it is raining" in caplog.text


@pytest.mark.slow
def test_decoder_and_registry_import_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import shared.kernels.backends.registry, shared.model.decoder"
    subprocess.run([sys.executable, "-c", code], check=True)
