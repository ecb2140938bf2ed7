"""The CPU's tuned backend: C++ kernels for the decoder, torch for the rest."""

from __future__ import annotations

import torch

from shared.kernels.cpu.build import AUTO, CannotBuild, choose
from shared.kernels.cpu.launch import CpuOps, load
from shared.kernels.cpu.packing import DTYPES
from shared.kernels.torch_backend import TorchKernels


class CpuKernels(CpuOps):
    """`Kernels` for x86-64 processors with AVX2 or more."""

    gather_blocks = staticmethod(TorchKernels.gather_blocks)
    scatter_blocks = staticmethod(TorchKernels.scatter_blocks)
    block_checksums = staticmethod(TorchKernels.block_checksums)
    sample_tokens = staticmethod(TorchKernels.sample_tokens)

    def __init__(self, isa: str = AUTO) -> None:
        """Loads the library of an instruction set; `refusal` has made sure that it exists."""
        chosen, path = choose(isa)
        self.isa = chosen.name
        super().__init__(load(path))

    @property
    def name(self) -> str:
        """With the instruction set: `cpu:avx512`. The registry knows that name too."""
        return f"cpu:{self.isa}"


def refusal(device: torch.device, dtype: torch.dtype, isa: str = AUTO) -> str | None:
    """Why these kernels cannot serve a device and dtype, or None. Compiles them where they are not yet."""
    if device.type != "cpu":
        return f"device {device} is not the CPU"
    if dtype not in DTYPES:
        return f"they compute in {' and '.join(str(d).removeprefix('torch.') for d in DTYPES)}, not in {dtype}"
    try:
        choose(isa)
    except CannotBuild as error:
        return str(error)
    return None
