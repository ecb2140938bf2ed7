"""The instruction sets that the C++ kernels are tested with: the one that `auto` tries first here, in slow tests all
others that this processor has, and where `TANDEM_TEST_EMULATED=1` asks for them, as `make test-all` does, the emulated
ones. Collecting tests compiles them."""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels.backends import cpu as cpu_backend
from shared.kernels.cpu import build, isa

REFUSAL = cpu_backend.refusal(torch.device("cpu"), torch.float32)
_FEATURES = frozenset() if REFUSAL else isa.processor_features()


def _emulated() -> tuple[isa.InstructionSet, ...]:
    return isa.emulated(_FEATURES) if os.environ.get("TANDEM_TEST_EMULATED") == "1" else ()


def _runs(each: isa.InstructionSet) -> bool:
    """Whether workers here would use it: the processor has it, and its library passes its self-check."""
    try:
        return not each.missing(_FEATURES) and bool(build.library(each))
    except build.CannotBuild:
        return False


ISAS = tuple(each.name for each in dict.fromkeys((*isa.BUILT, *_emulated())) if _runs(each))
SUMS = {
    "neon": "fma",
    "avx2": "fma",
    "avx512": "fma",
    "avx512-vnni": "fma",
    "amx-int8": "fma",
    "amx-int8-emulated": "fma",
    "avx512-bf16": "pairs",
    "avx512-bf16-emulated": "pairs",
    "amx": "tiles",
    "amx-emulated": "tiles",
}
"""How each multiplies in bf16. Two of one kind are sums in one order; a processor's own pairs and tiles may round
otherwise than the emulated ones, so only `fma` promises equal bits."""
needs_library = pytest.mark.skipif(REFUSAL is not None, reason=f"no C++ kernels here: {REFUSAL}")
EACH_ISA = [*ISAS[:1], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:])]
"""As values of a parameter."""
VECTORS = [isa for isa in ISAS if isa in ("avx2", "avx512")]
"""Sets whose fp32 products and sums are the same."""
needs_both_vectors = pytest.mark.skipif(len(VECTORS) < 2, reason="this processor has one of AVX2 and AVX-512 at most")
every_isa = pytest.mark.parametrize("isa", EACH_ISA)
