"""Builds what a GPU machine without network lacks to run a whole cluster: `make gpu-kit`.

    python .ci/gpu_kit.py [--out FILE] [--python 3.12]

One archive with the packages of requirements.lock that the services import, for another Python than this one too, and
the gRPC stubs. torch and Triton are not in it, nor what serving needs for Kubernetes alone. Static libraries, headers
and tests are left out, and equal files of a package are stored once: wheels have a library under each of its names.
`loadtest.bench.gpu_check.kit` unpacks it. With the tracked files it stays below what such a machine takes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 64 << 20
"""Limit of the tracked files and the kit together."""
LEFT_OUT = frozenset({"torch", "triton", "cuda-bindings", "cuda-core", "cuda-pathfinder", "kubernetes", "hf-xet"})
"""There already where torch is one for CUDA, or for planners and downloads alone; with what only they need."""
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
_NEEDLESS = re.compile(r"\.(a|h|hpp|cuh|pyx|pxd|cmake|pc|pyi)$|(^|/)(tests?|include|cmake|__pycache__)/")


def requirements(given: list[str], marked: dict[str, str]) -> dict[str, str]:
    """name -> version of `given` and all that they need here but `LEFT_OUT`; `marked`: the environment's markers that
    differ from this Python's."""
    found: dict[str, str] = {}
    waiting = [Requirement(text) for text in given]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or name in LEFT_OUT:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "", **marked}):
            continue
        installed = metadata.distribution(name)
        found[name] = installed.version
        waiting += [Requirement(text) for text in installed.requires or []]
    return found


def download(versions: dict[str, str], python: str, folder: Path) -> None:
    """The wheels of these versions for that Python on x86-64, into the folder. Raises CalledProcessError."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(folder),
            *(flag for platform in platforms for flag in ("--platform", platform)),
            *(f"{name}=={version}" for name, version in versions.items()),
        ],
        check=True,
    )  # fmt: skip


def add_wheel(archive: tarfile.TarFile, wheel: Path) -> None:
    """Its files as `NAME==VERSION/…`, those outside packages (scripts, data) left out; a repeated content as a link."""
    name, version = wheel.name.split("-")[:2]
    folder = f"{canonicalize_name(name)}=={version}"
    stored: dict[bytes, str] = {}
    with zipfile.ZipFile(wheel) as content:
        for item in content.infolist():
            path = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", item.filename)
            if item.is_dir() or ".data/" in path or _NEEDLESS.search(path):
                continue
            data = content.read(item)
            entry = tarfile.TarInfo(f"{folder}/{path}")
            entry.mode = 0o755 if item.external_attr >> 16 & 0o100 else 0o644
            first = stored.setdefault(hashlib.sha256(data).digest(), entry.name)
            if first != entry.name and data:
                entry.type, entry.linkname = tarfile.LNKTYPE, first
                archive.addfile(entry)
            else:
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


def add_own_version(archive: tarfile.TarFile) -> None:
    """What the services tell as their version: the sources that lie there are not installed."""
    own = metadata.distribution("tandem-llm")
    data = f"Metadata-Version: 2.1\nName: tandem-llm\nVersion: {own.version}\n".encode()
    entry = tarfile.TarInfo(f"tandem-llm=={own.version}/tandem_llm-{own.version}.dist-info/METADATA")
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def build(out: Path, python: str) -> int:
    """Writes the archive; returns its bytes. Raises SystemExit where a machine would not take it with the sources."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = requirements(dependencies, {"python_version": python, "python_full_version": f"{python}.99"})
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        download(versions, python, Path(scratch))
        partial = Path(scratch) / "kit"  # a build that ends early leaves no kit
        with tarfile.open(partial, "w:xz", preset=6) as archive:
            for wheel in sorted(Path(scratch).glob("*.whl")):
                add_wheel(archive, wheel)
            add_own_version(archive)
            for stub in sorted((ROOT / "shared" / "rpc" / "pb").rglob("*.py")):
                archive.add(stub, f"stubs/{stub.relative_to(ROOT)}")
        shutil.move(partial, out)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in tracked.stdout.split("\0") if name]
    sources = sum(path.stat().st_size for path in files if path.is_file())
    num_bytes = out.stat().st_size
    print(
        f"{out}: {num_bytes / 2**20:.1f} MiB for Python {python}, with the sources {(num_bytes + sources) / 2**20:.1f}"
    )
    if num_bytes + sources > MOST_BYTES:
        out.unlink()
        raise SystemExit(f"above {MOST_BYTES >> 20} MiB: a machine would not take it")
    return num_bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-kit.tar.xz")
    parser.add_argument("--python", default="3.12", help="that machine's version")
    options = parser.parse_args()
    build(options.out, options.python)
