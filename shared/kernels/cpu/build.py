"""Compiles `source/*.cpp` once for this processor and keeps the library in the user's cache.

A plain C library behind ctypes, not an extension against torch's headers: it compiles in seconds and fits any torch.
It asks torch's OpenMP runtime, which is loaded already and answers to the same name, how many threads to use.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fPIC",
    "-std=c++20",
    "-Wno-maybe-uninitialized",  # GCC 12's own headers of AVX-512
)
NEEDED_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
COMPILE_TIMEOUT_S = 300


class CannotBuild(Exception):
    """Why there is no library on this machine."""


def library() -> Path:
    """The compiled library, made now where it is not there yet; raises CannotBuild."""
    cpu = _cpu_flags()
    missing = [flag for flag in NEEDED_FLAGS if flag not in cpu]
    if missing:
        raise CannotBuild(f"the processor lacks {', '.join(missing)}")
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuild("g++ is not installed")
    target = _cache_folder() / f"kernels-{_key(compiler, cpu)}.so"
    if not target.exists():
        _build(compiler, target)
    return target


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _cache_folder() -> Path:
    return Path.home() / ".cache" / "tandem"


def _key(compiler: str, cpu: frozenset[str]) -> str:
    """Changes with the sources, the flags, the compiler and the processor."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=False).stdout
    digest.update("\n".join((*FLAGS, version, *sorted(cpu))).encode())
    return digest.hexdigest()


def _build(compiler: str, target: Path) -> None:
    """Several workers may start at once: one compiles, the others wait for it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "kernels.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise CannotBuild(f"no place to keep the compiled kernels: {error}") from error


def _compile(compiler: str, target: Path) -> None:
    """Each source by a process of its own, side by side."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [str(Path(folder, source.stem + ".o")) for source in _sources()]
        commands = [["-c", "-o", made, str(source)] for made, source in zip(objects, _sources(), strict=True)]
        for _ in pool.map(lambda arguments: _run(compiler, *arguments), commands):
            pass
        made = Path(folder, "kernels.so")
        _run(compiler, "-shared", "-o", str(made), *objects)
        made.replace(target)


def _sources() -> list[Path]:
    return sorted(SOURCE.glob("*.cpp"))


def _run(compiler: str, *arguments: str) -> None:
    try:
        done = subprocess.run(
            [compiler, *FLAGS, *arguments],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"g++ did not end within {COMPILE_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise CannotBuild(f"g++ failed: {done.stderr.strip().splitlines()[-1:]}")


def main() -> None:
    """Compiles the library, or prints why that cannot be: a machine without it still serves."""
    try:
        print(library())
    except CannotBuild as reason:
        print(f"no C++ kernels: {reason}")


if __name__ == "__main__":
    main()
