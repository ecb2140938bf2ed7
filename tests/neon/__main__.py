"""Runs tests of the C++ kernels as an aarch64 machine would, on x86-64: `make test-neon`.

    python -m tests.neon [PYTEST ARGUMENT …]

The kernels are compiled by Debian's cross compiler; Python, torch and the tests run under qemu's emulation of the
processor. That shows whether the numbers are right, and nothing about speed: a product takes a hundred times as long.
Needs a Debian of this release, root (apt-get installs qemu-user and the compiler) and PyPI; what it brings lies in
`.cache/aarch64`. Packages without native code come from this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "aarch64"
SYSTEM, SITE, HOME, COMMANDS = (CACHE / name for name in ("system", "site", "home", "bin"))
TRIPLET = "aarch64-linux-gnu"
DEBIAN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libstdc++6", "libgcc-s1",
    "libgomp1", "libgfortran5", "libatomic1", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", "libcrypt1",
)  # fmt: skip
TORCH = "torch==2.10.0"
"""The last one whose wheel for aarch64 needs no CUDA."""
NATIVE = ("numpy", "safetensors", "tokenizers", "hypothesis", "pyyaml")
"""Brought for aarch64 in the version of this environment."""
TESTS = tuple(
    f"tests/unit/kernels/test_cpu{part}.py" for part in ("", "_build", "_codes", "_experts", "_linear", "_sampling")
)

LIBRARIES = """
from shared.kernels.cpu import build, isa
build.CHECK_TIMEOUT_S = 3600
for each in (*isa.BUILT, *isa.emulated(frozenset())):
    print("checked", build.library(each).name)
    build.library(each.deterministic)
"""
"""Makes and checks them ahead: a library whose check does not end in time is passed over, and its tests with it."""


def bring() -> None:
    """Installs and unpacks all of it; what is there already stays."""
    if not shutil.which("qemu-aarch64") or not shutil.which(f"{TRIPLET}-g++"):
        _run("apt-get", "-qq", "update")
        _run("apt-get", "-qq", "install", "--no-install-recommends", "qemu-user", f"g++-{TRIPLET}")
    done = CACHE / "done"
    if done.exists():
        return
    shutil.rmtree(CACHE, ignore_errors=True)
    packages, wheels = CACHE / "packages", CACHE / "wheels"
    for folder in (packages, wheels, SITE, HOME, COMMANDS):
        folder.mkdir(parents=True)
    _run("dpkg", "--add-architecture", "arm64")
    _run("apt-get", "-qq", "update")
    _run("apt-get", "-qq", "download", *(f"{name}:arm64" for name in DEBIAN), cwd=packages)
    for package in sorted(packages.glob("*.deb")):
        _run("dpkg", "-x", str(package), str(SYSTEM))
    platforms = [f"--platform=manylinux{level}_aarch64" for level in ("_2_28", "_2_17", "2014")]
    _run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--only-binary=:all:", "--python-version=3.11", *platforms, f"--dest={wheels}",
        TORCH, *(f"{name}=={version(name)}" for name in NATIVE),
    )  # fmt: skip
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as content:
            content.extractall(SITE)
    (COMMANDS / "g++").symlink_to(f"/usr/bin/{TRIPLET}-g++")
    program = CACHE / "python"
    program.write_text(_program())
    program.chmod(0o755)
    # A process that a test starts is emulated too.
    (SITE / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(program)!r}\n")
    shutil.rmtree(packages)
    shutil.rmtree(wheels)
    done.touch()


def _program() -> str:
    """A shell script that is this Python on aarch64."""
    libraries = ":".join(str(SYSTEM / folder / TRIPLET) for folder in ("usr/lib", "lib"))
    environment = {
        "PYTHONHOME": SYSTEM / "usr",
        "PYTHONPATH": f"{SITE}:{sysconfig.get_path('purelib')}",  # of one name, the first: that for aarch64
        "PYTHONDONTWRITEBYTECODE": 1,
        "LD_LIBRARY_PATH": libraries,
        "HOME": HOME,
    }
    given = " ".join(f"-E '{name}={value}'" for name, value in environment.items())
    return f"#!/bin/sh\nexec qemu-aarch64 -cpu max -L '{SYSTEM}' {given} '{SYSTEM}/usr/bin/python3.11' \"$@\"\n"


def _run(*command: str, cwd: Path = ROOT) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """pytest's exit status; another one where a library cannot be made."""
    bring()
    environment = {**os.environ, "PATH": f"{COMMANDS}{os.pathsep}{os.environ['PATH']}"}
    program = str(CACHE / "python")
    subprocess.run([program, "-c", LIBRARIES], cwd=ROOT, env=environment, check=True)
    arguments = sys.argv[1:] or TESTS
    command = [program, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "1200", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
