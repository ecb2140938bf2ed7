"""Which backend serves a device: a short ordered list, each entry with the reason why it may be refused."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from shared.errors import ConfigError
from shared.kernels.attention.prefill import configs
from shared.kernels.backend import Kernels
from shared.kernels.backends import cpu as cpu_backend
from shared.kernels.device import device_limits
from shared.kernels.torch_backend import TorchKernels

AUTO = "auto"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One entry of the registry."""

    name: str
    devices: tuple[str, ...]
    """Device types that `auto` offers it; to be named outright, `refusal` decides alone."""
    refusal: Callable[[torch.device, torch.dtype], str | None]
    """Why it cannot serve this device and dtype, or None."""
    load: Callable[[], Kernels]
    """Imports what it needs. Called once `refusal` returned None."""


def backends() -> tuple[Backend, ...]:
    """All there are, the most specialised first: the order in which `auto` tries them."""
    return (
        Backend("triton", ("cuda",), _triton_refusal, _load_triton),
        Backend("cpu", ("cpu",), cpu_backend.refusal, cpu_backend.CpuKernels),
        Backend("torch", ("cuda", "cpu"), lambda _device, _dtype: None, TorchKernels),
    )


def deterministic_backends(*, alike: bool = False) -> tuple[Backend, ...]:
    """Backends in which a sequence's results depend on that sequence alone, to the bit; in the same order. `alike`: as
    for `DeterministicCpuKernels`."""
    refusal = partial(cpu_backend.refusal, deterministic=True, alike=alike)
    return (
        Backend("triton", ("cuda",), _triton_refusal, _load_deterministic_triton),
        Backend("cpu", ("cpu",), refusal, partial(cpu_backend.DeterministicCpuKernels, alike=alike)),
    )


def choose_kernels(
    device: torch.device | str,
    dtype: torch.dtype,
    wanted: str = AUTO,
    *,
    deterministic: bool = False,
    alike: bool = False,
) -> Kernels:
    """The backend named `wanted` (`cpu:avx2`: of one instruction set), or with `auto` the first that takes the device.

    What `auto` passes over is logged. `deterministic`: among `deterministic_backends`, with `alike`.

    Raises:
        ConfigError: `wanted` is unknown or refuses this device or dtype; the message gives its reason.
    """
    device = torch.device(device)
    candidates = deterministic_backends(alike=alike) if deterministic else backends()
    if wanted != AUTO:
        named = (*candidates, *_of_one_instruction_set(wanted, deterministic=deterministic))
        by_name = {backend.name: backend for backend in named}
        if wanted not in by_name:
            known = ", ".join((AUTO, *by_name))
            mode = " with deterministic" if deterministic else ""
            raise ConfigError(f"kernels must be one of {known}{mode}, not {wanted!r}", field="kernels", limit=known)
        reason = by_name[wanted].refusal(device, dtype)
        if reason is not None:
            raise ConfigError(f"kernels {wanted!r} cannot serve this worker: {reason}", field="kernels")
        return by_name[wanted].load()
    for backend in candidates:
        if device.type not in backend.devices:
            continue
        reason = backend.refusal(device, dtype)
        if reason is None:
            return backend.load()
        _log.warning("kernels %r passed over for %s: %s", backend.name, device, reason)
        if deterministic:  # there is no reference to fall back to
            raise ConfigError(
                f"deterministic kernels {backend.name!r} cannot serve this worker: {reason}", field="deterministic"
            )
    raise ConfigError(f"no kernels for device {device}", field="device")


def _of_one_instruction_set(wanted: str, *, deterministic: bool) -> tuple[Backend, ...]:
    """The C++ kernels of one instruction set, wanted by a name such as `cpu:avx2`."""
    name, _, isa = wanted.partition(":")
    if name != "cpu" or not isa:
        return ()
    refusal = partial(cpu_backend.refusal, isa=isa, deterministic=deterministic)
    kind = cpu_backend.DeterministicCpuKernels if deterministic else cpu_backend.CpuKernels
    return (Backend(wanted, ("cpu",), refusal, partial(kind, isa)),)


def _triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"{device} has compute capability {major}.{minor}, Triton's kernels need 8.0"
        return configs.refusal(device_limits(device))
    if not _is_interpreting():
        return f"device {device} is not a CUDA device, and Triton does not run as an interpreter"
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bfloat16 products: take float32 or float16"
    return None


def _is_interpreting() -> bool:
    from triton import knobs  # type: ignore[import-untyped, import-not-found, unused-ignore]

    return bool(knobs.runtime.interpret)


def _load_triton() -> Kernels:
    from shared.kernels.backends.triton import TritonKernels

    return TritonKernels()


def _load_deterministic_triton() -> Kernels:
    from shared.kernels.backends.triton import DeterministicTritonKernels

    return DeterministicTritonKernels()
