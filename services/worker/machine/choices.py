"""Resolves a worker's `auto` settings on this machine and refuses settings that it does not support."""

from __future__ import annotations

import torch

from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.identity import Roles, WorkerRole
from shared.kernels.backends.dtype_timing import faster_dtype
from shared.kernels.pool_view import CODES, KV_DTYPES, dtype_name
from shared.model.config.model_config import ModelConfig

AUTO_SWAP_BYTES = 256 << 20
"""Swap memory with host_swap_bytes = -1 beside a pool that lies in host memory itself."""
AUTO_GPU_SWAP_BYTES = 8 << 30
"""Most swap memory with host_swap_bytes = -1 beside a pool on a GPU: it is pinned, and pinning takes time."""
AUTO_GPU_SWAP_SHARE = 1 / 8
"""Largest share of the host memory free at the start that swap memory beside a pool on a GPU takes."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STORED = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def check_device(device: str) -> None:
    """Raises ConfigError where the device is not on this machine."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but torch sees no CUDA device on this machine", field="device")
    if place.index is not None and place.index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device is {device}, but torch sees {count} CUDA devices on this machine, numbered from 0",
            field="device",
            limit=count - 1,
        )


def choose_swap_bytes(settings: WorkerSettings, pool_bytes: int, free_bytes: int) -> int:
    """Host memory for preempted sequences, as the setting says; `free_bytes` is of host memory."""
    if settings.host_swap_bytes >= 0:
        return settings.host_swap_bytes
    if not settings.is_on_gpu:
        return AUTO_SWAP_BYTES
    return min(pool_bytes, AUTO_GPU_SWAP_BYTES, int(free_bytes * AUTO_GPU_SWAP_SHARE))


def choose_backend(settings: WorkerSettings) -> str:
    """The backend's name for the registry, with the instruction set where one is wanted."""
    if settings.cpu_isa == "auto" or settings.is_on_gpu or settings.kernels not in ("auto", "cpu"):
        return settings.kernels
    return "torch" if settings.cpu_isa == "torch" else f"cpu:{settings.cpu_isa}"


def choose_dtype(wanted: str, config: ModelConfig, device: str = "cpu", backend: str = "auto") -> torch.dtype:
    """`auto` is the checkpoint's dtype; on a CPU the faster one for bf16 checkpoints, fp32 for others. Blocking."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device != "cpu":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(config.dtype), torch.float32)
    return faster_dtype(backend) if config.dtype == "bfloat16" else torch.float32


def choose_kv_dtype(wanted: str, compute: torch.dtype, *, has_latents: bool = False) -> torch.dtype:
    """`auto` is the dtype of the computation. Raises ConfigError where no kernels read the one in the other."""
    kv_dtype = compute if wanted == "auto" else _STORED[wanted]
    served = [dtype for dtype in KV_DTYPES[compute] if not (has_latents and dtype in CODES)]
    if kv_dtype not in served:
        allowed = ", ".join(name for name, dtype in _STORED.items() if dtype in served)
        model = " of a model with latent attention" if has_latents else ""
        raise ConfigError(
            f"kv_dtype {wanted} is not supported beside computation in {dtype_name(compute)}{model}, only auto or "
            f"{allowed}",
            field="kv_dtype",
            limit=allowed,
        )
    return kv_dtype


def dtype_setting(dtype: torch.dtype) -> str:
    """The value of the setting `dtype` for it."""
    return next(name for name, served in DTYPES.items() if served == dtype)


def choose_kv_formats(
    settings: WorkerSettings, compute: torch.dtype, *, has_latents: bool, has_states: bool, roles: Roles
) -> tuple[str, str, str]:
    """(dtype, source, sent) of this worker's `KVFormat`. Raises ConfigError where they are not served."""
    wide = settings.prefill_kv_dtype
    if not settings.converts_kv:
        return dtype_name(choose_kv_dtype(settings.kv_dtype, compute, has_latents=has_latents)), "", ""
    if len(roles) != 1:
        raise ConfigError(
            f"prefill_kv_dtype {wide} beside kv_dtype {settings.kv_dtype} needs two pools: this worker both prefills "
            "and decodes",
            field="prefill_kv_dtype",
            value=wide,
        )
    if has_states:
        raise ConfigError("states of layers are not converted: prefill_kv_dtype must be same", field="prefill_kv_dtype")
    kept, codes = (
        dtype_name(choose_kv_dtype(wanted, compute, has_latents=has_latents)) for wanted in (wide, settings.kv_dtype)
    )
    return (kept, "", codes) if WorkerRole.PREFILL in roles else (codes, kept, "")
