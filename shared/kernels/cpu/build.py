"""Compiles `source/*.cpp` once for each instruction set that is used, and keeps the libraries in the user's cache.

One library an instruction set, not one for all: the linker merges inline functions of the same name, and an AVX2
processor might then run one that was compiled for AVX-512. `prebuild` puts all of them into the package, for wheels
and images: no compiler is needed there.

A plain C library behind ctypes, not an extension against torch's headers: it compiles in seconds and fits any torch.
It is linked with the C and C++ runtimes alone, and with no symbol of theirs newer than glibc 2.28's: a library made
here runs wherever torch's wheels do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.kernels.cpu import isa as isas
from shared.kernels.cpu.isa import ALIKE, BUILT, InstructionSet

SOURCE = Path(__file__).parent / "source"
PREBUILT = Path(__file__).parent / "prebuilt"
FLAGS = (
    "-O3",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # libraries of several instruction sets may share a process
    "-std=c++20",
    "-Wno-maybe-uninitialized",  # GCC 12's own headers of AVX-512
)
COMPILE_TIMEOUT_S = 300
CHECK_TIMEOUT_S = 120
AUTO = "auto"
AUTO_ORDER = tuple(isa for isa in BUILT if isa != isas.AMX_INT8)
"""Instruction sets that `auto` tries, in this order."""


class CannotBuild(Exception):
    """Why there is no library on this machine."""


def library(isa: InstructionSet) -> Path:
    """The library of an instruction set, compiled now where it is missing; raises CannotBuild, also where it cannot run
    here."""
    missing = isa.missing(isas.processor_features())
    if missing:
        raise CannotBuild(f"the processor lacks {', '.join(missing)}")
    path = made(isa)
    reason = _refusal(path) or (_failed_check(path) if isa.is_checked else None)
    if reason is not None:
        raise CannotBuild(reason)
    return path


def choose(wanted: str = AUTO, *, deterministic: bool = False, alike: bool = False) -> tuple[InstructionSet, Path]:
    """The instruction set `wanted`, or the fastest that this machine can run and build, and its library.

    `deterministic`: in its build of that name; `wanted` is a name without the suffix. `alike`: `auto` takes one of
    `isa.ALIKE`.

    Raises:
        CannotBuild: there is none; for `auto` the reason is that of the last one tried, which needs the least.
    """
    _check_machine()
    if wanted != AUTO:
        isa = isas.named(wanted, isas.processor_features())
        if isa is None:
            raise CannotBuild(f"there are kernels for {', '.join(isa.name for isa in BUILT)}, not for {wanted!r}")
        isa = isa.deterministic if deterministic else isa
        return isa, library(isa)
    reason = CannotBuild(f"there are no kernels for {platform.machine()}")
    for plain in ALIKE if alike else AUTO_ORDER:
        isa = plain.deterministic if deterministic else plain
        try:
            path = library(isa)
        except CannotBuild as error:
            reason = error
            continue
        if _pays(path):
            return isa, path
    raise reason


@functools.cache
def _pays(path: Path) -> bool:
    """Whether a library is faster than the next lower one, by a timing: one for a process, whose engines agree then."""
    return bool(ctypes.CDLL(str(path)).tandem_pays())


def prebuild(folder: Path = PREBUILT) -> list[Path]:
    """Compiles for every instruction set into `folder`, whatever this processor is, and returns the libraries."""
    _check_machine()
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / name for name in prebuilt_names()]
    for isa, target in zip(prebuilt_sets(), targets, strict=True):
        _compile(compiler, isa, target)
    return targets


def prebuilt_names() -> list[str]:
    """File names of the libraries that `prebuild` makes from the present sources."""
    return [_file_name(isa) for isa in prebuilt_sets()]


def prebuilt_sets() -> list[InstructionSet]:
    """Instruction sets that `prebuild` compiles: every one, and its deterministic kind."""
    return [build for isa in BUILT for build in (isa, isa.deterministic)]


def made(isa: InstructionSet) -> Path:
    """The library of an instruction set, shipped or compiled, for any processor. Raises CannotBuild."""
    prebuilt = PREBUILT / _file_name(isa)
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler()
    target = cache_folder() / _file_name(isa, compiler)
    if not target.exists():
        _build(compiler, isa, target)
    return target


def _refusal(path: Path) -> str | None:
    """The reason why the library cannot run here although the processor could."""
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the compiled kernels do not load: {error}"
    loaded.tandem_refusal.restype = ctypes.c_char_p
    reason = loaded.tandem_refusal()
    return None if reason is None else reason.decode()


def _failed_check(path: Path) -> str | None:
    """A wrong result of the library on this processor, or None; tried once for each library, see `self_check`."""
    passed = cache_folder() / f"{path.stem}.checked"
    if passed.exists():
        return None
    command = [sys.executable, "-m", "shared.kernels.cpu.self_check", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its self-check did not end within {CHECK_TIMEOUT_S} s"
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return f"its self-check failed on this processor: {reason[0]}"
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    return None


def _check_machine() -> None:
    """Raises CannotBuild on an architecture where neither the sources nor the flags mean anything."""
    if not isas.BUILT:
        raise CannotBuild(f"they are written for x86-64 and aarch64, not for {platform.machine()}")


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuild("g++ is not installed")
    return compiler


def cache_folder() -> Path:
    """The user's folder for what was compiled and measured on this machine."""
    return Path.home() / ".cache" / "tandem"


def _file_name(isa: InstructionSet, compiler: str | None = None) -> str:
    """Changes with the sources, the flags and, where the library is not shipped, the compiler."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = [] if compiler is None else [_run_plain(compiler, "-dumpfullversion")]
    digest.update("\n".join((*FLAGS, *isa.flags, *version)).encode())
    return f"kernels-{isa.name}-{digest.hexdigest()}.so"


def _build(compiler: str, isa: InstructionSet, target: Path) -> None:
    """Several workers may start at once: one compiles, the others wait for it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "kernels.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, isa, target)
    except OSError as error:
        raise CannotBuild(f"no place to keep the compiled kernels: {error}") from error


def _compile(compiler: str, isa: InstructionSet, target: Path) -> None:
    """Each source by a process of its own, side by side."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [str(Path(folder, source.stem + ".o")) for source in _sources()]
        commands = [
            [*isa.flags, "-c", "-o", made, str(source)] for made, source in zip(objects, _sources(), strict=True)
        ]
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


def _run_plain(compiler: str, *arguments: str) -> str:
    return subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False).stdout


def main() -> None:
    """Compiles the library that this machine uses, with `--all` those of the package. Without one, torch serves."""
    try:
        for path in prebuild() if "--all" in sys.argv[1:] else [choose()[1]]:
            print(path)
    except CannotBuild as reason:
        print(f"no C++ kernels: {reason}")


if __name__ == "__main__":
    main()
