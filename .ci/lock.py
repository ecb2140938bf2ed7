"""Writes requirements.lock: every package that Tandem runs and is developed with, each pinned by ==.

    python .ci/lock.py             resolve pyproject.toml; pins that still satisfy it stay (`make lock`)
    python .ci/lock.py --upgrade   resolve pyproject.toml to the newest versions (`make lock ARGS=--upgrade`)
    python .ci/lock.py --check     fail where the lock does not satisfy pyproject.toml (part of `make lint`)

uv resolves once for every supported Python and processor; a line that only some of them need has a marker. The lock is
written only if each of them can install all of its lines from wheels.

torch is pinned without a local version (`torch==2.13.0`), so that a machine may bring the CPU or the CUDA build. The
CUDA libraries that a CUDA build asks for differ from build to build and are pinned by torch itself: they are left out
here and installed along with torch. triton is pinned as pyproject.toml says, whatever torch asks for: this version
serves beside a torch build that asks for none (see `make setup`).

The package index is uv's: PyPI, or what UV_DEFAULT_INDEX and its like say. The lock names no index.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
MACHINES = ("x86_64", "aarch64")
ON_LINUX = "sys_platform == 'linux'"
"""The marker of `environments` in pyproject.toml: uv adds it to every line, the lock has it once in its header."""
GLIBC = "manylinux_2_31"
"""The oldest that all packages have wheels for; llguidance asks for the most."""
CUDA_LIBRARIES = ("cuda-", "nvidia-")
"""Beginnings of the names of the packages that a CUDA build of torch asks for."""


class CannotLock(Exception):
    """Why there is no lock for every Python and processor."""


@dataclass(frozen=True)
class Declared:
    """What pyproject.toml asks for."""

    requirements: tuple[Requirement, ...]
    """Runtime, development and build requirements."""
    pythons: tuple[str, ...]
    """Supported minor versions, oldest first, such as 3.11."""

    @classmethod
    def read(cls, text: str) -> Declared:
        """What the text of pyproject.toml declares."""
        content = tomllib.loads(text)
        project = content["project"]
        lines = [
            *project["dependencies"],
            *project["optional-dependencies"]["dev"],
            *content["build-system"]["requires"],
        ]
        supported = SpecifierSet(project["requires-python"])
        pythons = (f"3.{minor}" for minor in range(100))
        return cls(tuple(map(Requirement, lines)), tuple(filter(supported.contains, pythons)))

    @property
    def header(self) -> str:
        return (
            "# Every package of Tandem and its development, for Linux on "
            f"{' and '.join(MACHINES)} with Python {self.pythons[0]} to {self.pythons[-1]}.\n"
            "# Made by `make lock`. Install with --no-deps after torch (see `make setup`), "
            "so that nothing replaces the torch build that is there.\n"
        )

    def environments(self) -> Iterator[dict[str, str]]:
        """What markers are evaluated with, for every supported Python and processor."""
        for python in self.pythons:
            for machine in MACHINES:
                yield {
                    "python_version": python,
                    "python_full_version": f"{python}.99",  # a late one: markers ask for early ones at most
                    "platform_machine": machine,
                    "platform_system": "Linux",
                    "sys_platform": "linux",
                    "platform_python_implementation": "CPython",
                    "implementation_name": "cpython",
                }


def resolve(declared: Declared, previous: str) -> list[str]:
    """The lock's lines, by name. `previous`: a lock whose pins stay where they can. Raises CannotLock."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, overrides, answer = (Path(folder, name) for name in ("wanted.in", "overrides.in", "answer.txt"))
        wanted.write_text("".join(f"{requirement}\n" for requirement in declared.requirements))
        overrides.write_text("".join(f"{each}\n" for each in declared.requirements if each.name == "triton"))
        answer.write_text(previous)  # uv takes its preferences from the file that it overwrites
        _uv(
            "compile", "--universal", "--python-version", declared.pythons[0], "--fork-strategy", "fewest",
            "--override", str(overrides), "--annotation-style", "line", "--no-header",
            "--output-file", str(answer), str(wanted),
        )  # fmt: skip
        return without_cuda_libraries(answer.read_text().splitlines())


def without_cuda_libraries(annotated: list[str]) -> list[str]:
    """uv's lines `name==version ; marker  # via name, name` without annotations and the CUDA libraries of torch alone.

    Raises CannotLock for a local version such as 2.13.0+cpu: that build is for some machines only.
    """
    lines, asked_by = {}, {}
    for text in annotated:
        pin, _, via = text.partition("# via ")
        name, _, version = pin.partition(";")[0].strip().partition("==")
        if "+" in version:
            raise CannotLock(f"{name} {version} is one machine's build: resolve without UV_FIND_LINKS and UV_INDEX")
        lines.setdefault(name, []).append(_without_linux(pin.strip()))
        asked_by.setdefault(name, set()).update(map(str.strip, via.split(",")))
    left_out = {"torch"}
    while more := {
        name for name in asked_by.keys() - left_out if name.startswith(CUDA_LIBRARIES) and asked_by[name] <= left_out
    }:
        left_out |= more
    left_out.discard("torch")
    return [line for name in sorted(lines) if name not in left_out for line in lines[name]]


def _without_linux(pin: str) -> str:
    for text in (f" and {ON_LINUX}", f"{ON_LINUX} and ", f" ; {ON_LINUX}"):
        pin = pin.replace(text, "")
    return pin


def check_wheels(declared: Declared, lock: Path) -> None:
    """Raises CannotLock unless every supported Python and processor can install the lock from wheels."""
    with tempfile.TemporaryDirectory() as folder:
        for python in declared.pythons:
            for machine in MACHINES:
                _uv(
                    "install", "--dry-run", "--no-deps", "--only-binary", ":all:", "--target", folder,
                    "--python-version", python, "--python-platform", f"{machine}-{GLIBC}",
                    "--requirement", str(lock),
                )  # fmt: skip


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", "pip", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotLock(f"uv pip {' '.join(arguments)}\n{done.stderr.strip()}")


def problems(declared: Declared, lock: str) -> list[str]:
    """Where the text of a lock does not satisfy pyproject.toml, in words."""
    found = [] if lock.startswith(declared.header) else ["pyproject.toml supports other Pythons than requirements.lock"]
    pins = [Requirement(line) for line in lock.splitlines() if line and not line.startswith("#")]
    for environment in declared.environments():
        versions = {
            canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
            for pin in pins
            if pin.marker is None or pin.marker.evaluate(environment)
        }
        for requirement in declared.requirements:
            version = versions.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                found.append(f"pyproject.toml asks for {requirement}, requirements.lock has {version or 'nothing'}")
    return list(dict.fromkeys(found))


def write(declared: Declared, previous: str) -> None:
    """Replaces the lock by a new one that was tried; raises CannotLock."""
    lines = resolve(declared, previous)
    tried = LOCK.with_suffix(".new")
    try:
        tried.write_text(declared.header + "".join(f"{line}\n" for line in lines))
        check_wheels(declared, tried)
        tried.replace(LOCK)
    finally:
        tried.unlink(missing_ok=True)
    print(f"{LOCK.name}: {len(lines)} packages")


def main() -> int:
    """Exit status: 0, or 1 with the reasons on stderr."""
    parser = argparse.ArgumentParser(description="Write or check requirements.lock.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="only compare the lock with pyproject.toml")
    mode.add_argument("--upgrade", action="store_true", help="take the newest versions, not those of the lock")
    arguments = parser.parse_args()
    declared = Declared.read((ROOT / "pyproject.toml").read_text())
    lock = LOCK.read_text() if LOCK.exists() else ""
    if arguments.check:
        found = problems(declared, lock)
        for line in found:
            print(f"{line}: run `make lock`", file=sys.stderr)
        return 1 if found else 0
    try:
        write(declared, "" if arguments.upgrade else lock)
    except CannotLock as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
