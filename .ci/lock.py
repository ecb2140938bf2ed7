"""Writes requirements.lock: every package that Tandem runs and is developed with, each pinned by ==.

    python .ci/lock.py           resolve pyproject.toml anew and write the lock (`make lock`)
    python .ci/lock.py --check   fail where the lock does not satisfy pyproject.toml (part of `make lint`)

pip resolves; this script only keeps the part of its report that a lock should say. torch is pinned without a local
version (`torch==2.13.0`), so that a machine may bring the CPU or the CUDA build. The accelerator libraries that a
CUDA build asks for carry exact pins of torch's own, differ from build to build and are installed along with it;
they are left out here.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Every package of Tandem and its development, for Linux x86_64 and Python 3.11. Made by `make lock`.
# Install with --no-deps after torch (see `make setup`), so that nothing replaces the torch build that is there.
"""


def declared() -> list[Requirement]:
    """Runtime, development and build requirements of pyproject.toml."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    lines = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *content["build-system"]["requires"],
    ]
    return [Requirement(line) for line in lines]


def resolve(requirements: list[Requirement]) -> dict[str, dict[str, Any]]:
    """pip's choice for the requirements and all they need: metadata by canonical name."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", "-", *map(str, requirements)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    packages = [item["metadata"] for item in report["install"]]
    return {canonicalize_name(metadata["name"]): metadata for metadata in packages}


def closure(roots: list[Requirement], resolved: dict[str, dict[str, Any]]) -> dict[str, str]:
    """name → version of all that the roots reach, without torch's accelerator libraries."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = list(roots)
    while pending:
        requirement = pending.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        metadata = resolved[name]
        pins[name] = metadata["version"].partition("+")[0]
        for needed in map(Requirement, metadata.get("requires_dist", [])):
            marker = needed.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                continue
            if name == "torch" and "platform_system" in str(marker):
                continue
            pending.append(needed)
    return pins


def locked() -> dict[str, str]:
    """name → version as the lock says now."""
    lines = (line for line in LOCK.read_text().splitlines() if line and not line.startswith("#"))
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def problems() -> list[str]:
    """Where the lock does not satisfy pyproject.toml, in words."""
    pins = locked()
    found = []
    for requirement in declared():
        version = pins.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"pyproject.toml asks for {requirement}, requirements.lock has {version or 'nothing'}")
    return found


def main() -> int:
    """Exit status: 0, or 1 with the reasons on stderr."""
    parser = argparse.ArgumentParser(description="Write or check requirements.lock.")
    parser.add_argument("--check", action="store_true", help="only compare the lock with pyproject.toml")
    if parser.parse_args().check:
        found = problems()
        for line in found:
            print(f"{line}: run `make lock`", file=sys.stderr)
        return 1 if found else 0
    here = (sys.version_info[:2], sys.platform, platform.machine())
    if here != ((3, 11), "linux", "x86_64"):
        print(f"the lock is made with Python 3.11 on Linux x86_64, this is {here}", file=sys.stderr)
        return 1
    roots = declared()
    pins = closure(roots, resolve(roots))
    LOCK.write_text(HEADER + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))
    print(f"{LOCK.name}: {len(pins)} packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
