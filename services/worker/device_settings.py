"""Settings of the device and the cores that a worker computes on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, ValidationInfo, field_validator

from shared.kv.encryption_modes import NO_ENCRYPTION
from shared.settings.group import SettingGroup

TIMED = "timed:"


class DeviceSettings(SettingGroup):
    """Where and with what the engine computes."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+(,[0-9]+)*)?|timed:.+)$")
    """Where the engine runs: cpu, cuda, or cuda:N for the GPU of that index. On cuda, decode steps are CUDA graphs, and
    each is planned while the one before runs, unless guesses behind that one are worth more (`speculation`). A worker
    of `tp` times `pp` processes takes that number of GPUs, the first ones or cuda:0,1,… in their order; there without
    graphs, and each step planned behind the one before. timed:FILE is a device of another speed: a step takes the time
    that FILE gives for it and computes nothing, so answers say nothing either; for load tests. FILE is what `make
    bench-engine OUT=FILE` wrote, or names the coefficients."""
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that this worker takes, of the whole and not of what is free: weights, steps and pool.
    Workers that share a GPU need shares that add up to less than 1."""
    gpu_direct: bool | Literal["auto"] = "auto"
    """Whether UCX sends and receives blocks straight from and into the GPU's memory, not by way of host memory; the GPU
    then also checks them and makes their tags. Only on cuda, by one process, with a UCX that has CUDA transports, and
    without block_encryption, which is done on the host. auto: where all of that is so."""
    kernels: str = "auto"
    """Backend of the model's ops: triton (CUDA), cpu (C++), torch, or auto: the first that this machine
    supports."""
    piecewise_tokens: int = Field(default=-1, ge=-1, le=8192)
    """Longest step of prompts, or of prompts and answers, that runs as CUDA graphs between its attention calls; 0 =
    none. For 512 tokens, 24 graphs a layer are captured at the start. Only on cuda, and by one process. -1 = 512 there,
    none elsewhere."""
    cpu_isa: Literal["auto", "avx2", "avx512", "avx512-bf16", "amx", "amx-emulated", "neon", "torch"] = Field(
        default="auto", validation_alias=AliasChoices("cpu_isa", "TANDEM_WORKER_CPU_ISA", "TANDEM_CPU_ISA")
    )
    """Instruction set of the C++ kernels. auto: the fastest that the processor runs; torch: no C++ kernels;
    amx-emulated: the code for AMX with plain C++ in place of its instructions, slow, for tests. Also read from
    TANDEM_CPU_ISA."""
    debug_numerics: bool = False
    """Whether errors about NaN or infinite numbers name the part of the model where they begin. Slower."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads; 0 = one for each core that the worker has, however many hardware threads it has, within the
    cgroup's CPU quota."""
    cpu_affinity: str = ""
    """CPUs that the process is pinned to, such as 0-3,8. Empty = a worker on the CPU keeps to one NUMA node, and off
    the slow cores of a hybrid processor."""

    @field_validator("piecewise_tokens", "gpu_direct")
    @classmethod
    def _check_on_gpu(cls, value: int | str, info: ValidationInfo) -> int | str:
        is_wanted = value != "auto" and int(value) > 0
        if is_wanted and not is_gpu(device := info.data.get("device", "cuda")):
            raise ValueError(f"needs a GPU: device is {device}")
        return value

    @field_validator("gpu_direct")
    @classmethod
    def _check_direct(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        encryption = info.data.get("block_encryption", NO_ENCRYPTION)
        if value is True and encryption != NO_ENCRYPTION:
            raise ValueError(f"cannot be used with block_encryption {encryption}, which is done on the host")
        return value

    @property
    def is_on_gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return is_gpu(self.device)

    @property
    def step_times(self) -> Path | None:
        """The file of a timed device; None for one that computes."""
        return Path(self.device.removeprefix(TIMED)) if self.device.startswith(TIMED) else None

    @property
    def may_draft(self) -> bool:
        """Whether a draft model can run on the worker's device."""
        return self.step_times is None

    def may_guess(self, *, has_states: bool) -> bool:
        """Whether its device computes guesses for a model whose layers keep states, or for one without."""
        return not (self.is_on_gpu and has_states)


def is_gpu(device: str) -> bool:
    """Whether a device of these settings is a GPU, or several."""
    return device.startswith("cuda")
