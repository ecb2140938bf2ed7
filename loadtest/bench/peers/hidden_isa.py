"""Runs a whole engine, its libraries included, as if on a processor with fewer instruction sets: see hide_isa.c."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from shared.kernels.cpu import isa

SOURCE = Path(__file__).with_name("hide_isa.c")
NEEDS = "cpuid_fault"
"""The feature of processor and kernel by which CPUID can be answered otherwise, as Linux names it."""
HIDES = (isa.AVX2.name, isa.AVX512.name, isa.AVX512_BF16.name)


class CannotHide(Exception):
    """Not on this machine; the message gives the reason."""


def environment(cpu_isa: str, folder: Path) -> dict[str, str]:
    """What a process's environment needs to see `cpu_isa` as the widest set; nothing for the others of `isa` and for
    auto. Builds the library into `folder`. Raises CannotHide."""
    if cpu_isa not in HIDES:
        return {}
    if NEEDS not in isa.processor_features():
        raise CannotHide(f"this processor has no {NEEDS}: it cannot pass for one with {cpu_isa} only")
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        raise CannotHide("hiding an instruction set needs gcc")
    folder.mkdir(parents=True, exist_ok=True)
    library = (folder / "hide_isa.so").absolute()
    command = [compiler, "-x", "c", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotHide(f"{SOURCE.name} does not compile: {done.stderr.strip()}")
    return {"LD_PRELOAD": str(library), "TANDEM_HIDE_ISA": cpu_isa}
