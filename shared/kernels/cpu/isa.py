"""The instruction sets that the C++ kernels are compiled for, and which of them this processor runs."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_V3, _V4 = "-march=x86-64-v3", "-march=x86-64-v4"


@dataclass(frozen=True)
class InstructionSet:
    """One build of the kernels."""

    name: str
    needs: tuple[str, ...]
    """Features of the processor, as Linux names them; it lists only those that it also permits."""
    flags: tuple[str, ...]
    """Of the compiler."""
    is_checked: bool = False
    """Whether the library has to pass `self_check` before its first use: few processors have these instructions."""

    def missing(self, features: frozenset[str]) -> list[str]:
        """What a processor of these features lacks, in order."""
        return [need for need in self.needs if need not in features]


AVX2 = InstructionSet("avx2", _AVX2, (_V3,))
AVX512 = InstructionSet("avx512", _AVX512, (_V4,))
AVX512_BF16 = InstructionSet(
    "avx512-bf16", (*_AVX512, "avx512_bf16"), (_V4, "-mavx512bf16", "-DTANDEM_PAIRS"), is_checked=True
)
AMX = InstructionSet(
    "amx", (*_AVX512, "amx_tile", "amx_bf16"), (_V4, "-mamx-tile", "-mamx-bf16", "-DTANDEM_AMX"), is_checked=True
)
BUILT = (AMX, AVX512_BF16, AVX512, AVX2)
"""All that processors run, the fastest first."""


def emulated(features: frozenset[str]) -> tuple[InstructionSet, ...]:
    """The code for bf16 instructions with plain C++ in their place, for tests, over the widest vectors there are."""
    base = AVX2 if AVX512.missing(features) else AVX512
    return (
        InstructionSet("avx512-bf16-emulated", base.needs, (*base.flags, "-DTANDEM_PAIRS")),
        InstructionSet(
            "amx-emulated", base.needs, (*base.flags, "-DTANDEM_AMX", "-DTANDEM_EMULATED_TILES"), is_checked=True
        ),
    )


def named(name: str, features: frozenset[str]) -> InstructionSet | None:
    """The one of that name, emulated ones among them."""
    return next((isa for isa in (*BUILT, *emulated(features)) if isa.name == name), None)


def processor_name() -> str:
    """What Linux calls this machine's processor: on x86-64 its model name, elsewhere the numbers that identify it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("model name", "CPU implementer", "CPU part", "CPU variant")
    found = [
        value.strip() for name in names for line in lines if line.startswith(name) for value in [line.partition(":")[2]]
    ]
    return " ".join(dict.fromkeys(found)) or platform.machine()


def processor_features() -> frozenset[str]:
    """Of this machine; empty where Linux does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
