"""The instruction sets that the C++ kernels are compiled for, and which of them this processor runs."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
DETERMINISTIC = "-deterministic"
"""Suffix of the builds that `InstructionSet.deterministic` gives."""
_V3, _V4 = "-march=x86-64-v3", "-march=x86-64-v4"
_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")


@dataclass(frozen=True)
class InstructionSet:
    """One build of the kernels."""

    name: str
    needs: tuple[str, ...]
    """Features of the processor, as Linux names them; it lists only those that it also permits."""
    flags: tuple[str, ...]
    """The compiler's flags."""
    is_checked: bool = False
    """Whether the library has to pass `self_check` before its first use: we have met few processors that run it."""
    machines: tuple[str, ...] = _X86
    """`platform.machine()` of the machines that compile it."""

    @property
    def deterministic(self) -> InstructionSet:
        """The build in which each row's results depend on that row alone, to the bit; its name has a suffix.

        Without contraction: where the compiler may join products and sums, it does so differently in each kernel.
        """
        flags = (*self.flags, "-DTANDEM_DETERMINISTIC", "-ffp-contract=off")
        return replace(self, name=self.name + DETERMINISTIC, flags=flags)

    def missing(self, features: frozenset[str]) -> list[str]:
        """Required features that are not among these, in order."""
        return [need for need in self.needs if need not in features]


_VNNI = (*_AVX512, "avx512_vnni")
_TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DTANDEM_TILES")
AVX2 = InstructionSet("avx2", _AVX2, (_V3,))
AVX512 = InstructionSet("avx512", _AVX512, (_V4,))
AVX512_VNNI = InstructionSet("avx512-vnni", _VNNI, (_V4, "-mavx512vnni"))
AVX512_BF16 = InstructionSet(
    "avx512-bf16",
    (*_VNNI, "avx512_bf16", "avx512vbmi"),
    (_V4, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi", "-DTANDEM_PAIRS"),
    is_checked=True,
)
"""Needs VBMI too: Cooper Lake, which alone has AVX512-BF16 without it, takes AVX512-VNNI."""
AMX = InstructionSet(
    "amx",
    (*_VNNI, "avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"),
    (_V4, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi", *_TILES, "-DTANDEM_AMX"),
    is_checked=True,
)
AMX_INT8 = InstructionSet(
    "amx-int8", (*_VNNI, "amx_tile", "amx_bf16", "amx_int8"), (_V4, "-mavx512vnni", *_TILES), is_checked=True
)
"""AMX for products of whole numbers alone; all else is computed as with AVX512."""
NEON = InstructionSet("neon", (), ("-march=armv8-a",), is_checked=True, machines=_ARM)
"""Part of aarch64 itself. Widens bf16 as AVX2 does: the instructions for bf16 that some processors have stay unused."""
BUILT = tuple(
    isa for isa in (AMX, AVX512_BF16, AMX_INT8, AVX512_VNNI, AVX512, AVX2, NEON) if platform.machine() in isa.machines
)
"""All that processors of this machine's kind run, the fastest first; empty where there are no kernels for the kind."""
ALIKE = tuple(isa for isa in BUILT if isa not in (AMX, AVX512_BF16))
"""Instruction sets whose deterministic builds compute the same bits; sums of whole numbers are exact on all of them."""


def emulated(features: frozenset[str]) -> tuple[InstructionSet, ...]:
    """The code for bf16 instructions with plain C++ in their place, for tests, over the widest vectors there are."""
    if not BUILT:
        return ()
    base = next((isa for isa in (AVX512, NEON) if isa in BUILT and not isa.missing(features)), BUILT[-1])
    pairs = replace(base, name="avx512-bf16-emulated", flags=(*base.flags, "-DTANDEM_PAIRS"), is_checked=False)
    whole_tiles = (*base.flags, "-DTANDEM_TILES", "-DTANDEM_EMULATED_TILES")
    tiles = (*whole_tiles, "-DTANDEM_AMX")
    return (
        pairs,
        replace(base, name="amx-emulated", flags=tiles, is_checked=True),
        replace(base, name="amx-int8-emulated", flags=whole_tiles, is_checked=True),
    )


def named(name: str, features: frozenset[str]) -> InstructionSet | None:
    """The one of that name, emulated ones among them."""
    return next((isa for isa in (*BUILT, *emulated(features)) if isa.name == name), None)


def processor_name() -> str:
    """The name of this machine's processor in Linux: on x86-64 its model name, elsewhere the numbers that identify
    it."""
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
    """Features of this machine's processor; empty where Linux does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
