"""Builds a wheel that needs no compiler: `make wheel`, into dist/ (or --out).

    python .ci/build_wheel.py [--out FOLDER] [--libraries FOLDER]

Inside are the C++ kernels for every instruction set of this machine's kind of processor, the gRPC stubs and the demo
model: all that `tandem serve` needs beside the packages that pyproject.toml names. The compiler targets each
instruction set by flags, so any x86-64 machine with g++ makes all of x86-64; --libraries takes libraries that were made
before in place of the compiler.

The wheel's tag is the lowest of `LEVELS` whose machines have every symbol version and library that the kernels ask for,
read with readelf. Nothing is written into the checkout but the wheel: it is built from a copy.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shared.kernels.cpu.build import CannotBuild, prebuild, prebuilt_names  # noqa: E402 - the path is set only now

CONTENT = (
    "services",
    "shared",
    "tandem",
    "tandem_cli",
    "loadtest",
    "models/demo",
    "proto",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
LIBRARIES = "shared/kernels/cpu/prebuilt"
SYSTEM = frozenset(
    ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
)
"""Libraries that every machine of a level has; another one would have to be in the wheel."""

SETUP = """\
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

class WithLibraries(Distribution):
    def has_ext_modules(self):
        return True  # so that it is installed where libraries go

class AnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", "{platform}"  # ctypes calls the libraries: they know no Python

setup(distclass=WithLibraries, cmdclass={{"bdist_wheel": AnyPython}})
"""
"""What pyproject.toml cannot say."""

Version = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """What machines of one manylinux tag have: the newest symbol versions of each runtime (PEP 600)."""

    tag: str
    newest: dict[str, Version]

    def lacks(self, wanted: Iterable[tuple[str, Version]]) -> list[str]:
        """Which of the wanted versions such a machine may not have."""
        return [
            f"{runtime}_{'.'.join(map(str, version))}"
            for runtime, version in wanted
            if version > self.newest.get(runtime, ())
        ]


LEVELS = (
    Level(
        f"manylinux_2_28_{machine()}", {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
    ),
    Level(
        f"manylinux_2_34_{machine()}", {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)}
    ),
)
"""The lowest first. torch's own wheels need 2.28, so a lower one would serve no further machine."""


class CannotTag(Exception):
    """Why the wheel would not run on other machines."""


def needs(library: Path) -> tuple[set[str], set[tuple[str, Version]]]:
    """The libraries and the symbol versions that it asks for. Raises CannotTag where readelf fails."""
    done = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--version-info", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CannotTag(f"readelf cannot read {library.name}: {done.stderr.strip()}")
    libraries = set(re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout))
    versions = re.findall(r"Name: ([A-Z]+)_(\d+(?:\.\d+)*)\s", done.stdout)
    return libraries, {(runtime, tuple(map(int, version.split(".")))) for runtime, version in versions}


def tag(libraries: set[str], versions: set[tuple[str, Version]]) -> str:
    """The lowest tag that satisfies both. Raises CannotTag where none does."""
    if foreign := sorted(libraries - SYSTEM):
        raise CannotTag(f"the kernels ask for libraries that other machines may lack: {', '.join(foreign)}")
    for level in LEVELS:
        if not (lacks := level.lacks(sorted(versions))):
            return level.tag
    raise CannotTag(f"the kernels ask for symbols newer than {LEVELS[-1].tag}: {', '.join(lacks)}")


def stage(folder: Path, libraries: Path | None) -> str:
    """Copies what the wheel is made of into `folder`, makes what git does not keep, and returns the tag."""
    for name in CONTENT:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "prebuilt", "pb"))
        else:
            shutil.copy2(source, target)
    subprocess.run([sys.executable, "shared/rpc/generate.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    place = folder / LIBRARIES
    if libraries is None:
        made = prebuild(place)
    else:
        place.mkdir(parents=True)
        made = [Path(shutil.copy2(libraries / name, place)) for name in prebuilt_names()]
    wanted_libraries: set[str] = set()
    wanted_versions: set[tuple[str, Version]] = set()
    for path in made:
        path.chmod(0o755)
        each_libraries, each_versions = needs(path)
        wanted_libraries |= each_libraries
        wanted_versions |= each_versions
    return tag(wanted_libraries, wanted_versions)


def build(folder: Path, platform: str, out: Path) -> Path:
    """The wheel of a staged folder, written into `out`. Raises CannotBuild with what setuptools says."""
    (folder / "setup.py").write_text(SETUP.format(platform=platform))
    made = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", made], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBuild(f"setuptools failed: {done.stderr.strip()}")
    (wheel,) = (folder / "dist").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, out))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the wheel's path. Exit status 1 with the reason where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write the wheel to")
    parser.add_argument("--libraries", type=Path, help="folder of libraries that were compiled from these sources")
    options = parser.parse_args(arguments)
    out, libraries = options.out.resolve(), options.libraries and options.libraries.resolve()
    try:
        with tempfile.TemporaryDirectory() as folder:
            platform = stage(Path(folder), libraries)
            print(build(Path(folder), platform, out))
    except (CannotBuild, CannotTag, FileNotFoundError) as reason:
        sys.exit(f"no wheel: {reason}")


if __name__ == "__main__":
    main()
