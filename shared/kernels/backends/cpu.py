"""The CPU's tuned backend: C++ kernels for the decoder, torch for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.collectives.interface import Collectives
from shared.errors import ConfigError
from shared.kernels.backend import Linear
from shared.kernels.cpu.build import AUTO, CannotBuild, choose
from shared.kernels.cpu.coded import CodedLinear, coded_linear
from shared.kernels.cpu.launch import CpuOps
from shared.kernels.cpu.layer_stack import CpuLayerStack
from shared.kernels.cpu.library import load
from shared.kernels.cpu.linear import DTYPES, LANES, PANEL, PaddedLinear, fits_panels
from shared.kernels.layer_stack import LayerSizes, LayerWeights
from shared.kernels.pool_view import dtype_name
from shared.kernels.quantized import QuantizedWeight
from shared.kernels.torch_backend import TorchKernels


class CpuKernels(CpuOps):
    """`Kernels` for processors with AVX2 or more, or NEON."""

    gather_blocks = staticmethod(TorchKernels.gather_blocks)
    scatter_blocks = staticmethod(TorchKernels.scatter_blocks)
    block_checksums = staticmethod(TorchKernels.block_checksums)
    block_key_sums = staticmethod(TorchKernels.block_key_sums)

    def __init__(self, isa: str = AUTO, *, deterministic: bool = False, alike: bool = False) -> None:
        """Loads the library of an instruction set; `refusal` has made sure that it exists."""
        chosen, path = choose(isa, deterministic=deterministic, alike=alike)
        self.isa = chosen.name
        super().__init__(load(path))

    @property
    def name(self) -> str:
        """The backend's name with its instruction set: `cpu:avx512`. The registry has that name too."""
        return f"cpu:{self.isa}"


class DeterministicCpuKernels(CpuKernels):
    """`Kernels` in which a sequence's results depend on that sequence alone, to the bit.

    With AVX2 and with AVX-512 they are the same; with AVX512-BF16 or AMX others, which `alike` leaves out: AMX then
    serves only products of whole numbers. No op is left to torch, whose order of sums follows the number of rows.
    """

    is_deterministic = True

    def __init__(self, isa: str = AUTO, *, alike: bool = False) -> None:
        """`isa`: a name without the suffix of the deterministic build."""
        super().__init__(isa, deterministic=True, alike=alike)

    def make_quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """See `DecoderOps`. Raises ConfigError for a form or size that would be left to torch."""
        shape = tuple(weight.shape)
        made = coded_linear(lambda: self.library, weight, bias, dtype)
        if not isinstance(made, CodedLinear):
            raise ConfigError(
                f"deterministic serves weights in codes of int8 and int4, rows in multiples of {PANEL}, groups of "
                f"multiples of {LANES} adjacent columns: here is one of {weight.spec.kind}, {shape[0]} rows and "
                f"{shape[1]} columns",
                field="deterministic",
                limit=PANEL,
            )
        return made

    def make_linear(self, weight: Tensor, bias: Tensor | None, *, own: bool) -> Linear:
        """See `DecoderOps`. A weight that does not fit vectors is padded with zeros."""
        if fits_panels(weight):
            return super().make_linear(weight, bias, own=own)
        return PaddedLinear.pack(lambda: self.library, weight, bias)

    def stack_layers(
        self, layers: Sequence[LayerWeights], last_norm: Tensor, sizes: LayerSizes, group: Collectives | None = None
    ) -> CpuLayerStack:
        """See `StacksLayers`. Raises ConfigError for sizes of which an op would be left to torch."""
        stack = super().stack_layers(layers, last_norm, sizes, group)
        if stack is None:
            down = layers[0].down
            assert down is not None, "layers without a feed-forward block"
            raise ConfigError(
                "deterministic needs a model whose hidden_size is a multiple of 32, intermediate_size of 16 and "
                f"head_dim of 32, at most 512; here hidden_size is {last_norm.shape[0]}, intermediate_size "
                f"{down.in_size} and head_dim {sizes.head_dim}",
                field="deterministic",
                limit=32,
            )
        return stack


def refusal(
    device: torch.device, dtype: torch.dtype, isa: str = AUTO, *, deterministic: bool = False, alike: bool = False
) -> str | None:
    """Why these kernels cannot serve a device and dtype, or None. Compiles them where they are not yet."""
    if device.type != "cpu":
        return f"device {device} is not the CPU"
    if dtype not in DTYPES:
        return f"they compute in {' and '.join(dtype_name(d) for d in DTYPES)}, not in {dtype}"
    try:
        choose(isa, deterministic=deterministic, alike=alike)
    except CannotBuild as error:
        return str(error)
    return None
