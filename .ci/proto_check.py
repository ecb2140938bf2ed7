"""Lints `proto/`, and compares it with the definitions that are in use: `proto/baseline.binpb`.

    python .ci/proto_check.py [--check | --accept-breaking]

Services of two versions talk to each other while a cluster is updated, and clients keep their stubs: numbers, types and
names never change, and what is removed is reserved. Without a flag the baseline is written anew, unless a change breaks
what it has; `--accept-breaking` writes it all the same. With `--check` nothing is written; exit status 1 where
something breaks or the baseline is stale. Everything runs offline, by buf.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto"
BASELINE = "baseline.binpb"
BUF = Path(sys.executable).parent / "buf"


def faults(folder: Path, *, breaking: bool = True) -> list[str]:
    """What buf says against the definitions in a folder, a line each: style, and what breaks its baseline."""
    found = _run(folder, "lint")
    if breaking and (folder / BASELINE).exists():
        found += _run(folder, "breaking", "--against", BASELINE)
    return found


def image(folder: Path) -> bytes:
    """The definitions as a descriptor set, comments left out. Raises SystemExit where they do not compile."""
    with tempfile.TemporaryDirectory() as out:
        path = Path(out) / "image.binpb"
        found = _run(folder, "build", "--exclude-source-info", "-o", str(path))
        if found:
            raise SystemExit("\n".join(found))
        return path.read_bytes()


def _run(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return lines or [f"buf {arguments[0]} ended with status {done.returncode}"] if done.returncode else []


def main() -> int:
    """0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description="lint proto/ and compare it with its baseline")
    flags = parser.add_mutually_exclusive_group()
    flags.add_argument("--check", action="store_true", help="write nothing")
    flags.add_argument(
        "--accept-breaking", action="store_true", help="make what is there the baseline, whatever it breaks"
    )
    asked = parser.parse_args()
    found = faults(PROTO, breaking=not asked.accept_breaking)
    for line in found:
        print(f"proto/{line}")
    if found:
        return 1
    now, baseline = image(PROTO), PROTO / BASELINE
    if baseline.exists() and baseline.read_bytes() == now:
        return 0
    if asked.check:
        print(f"proto/{BASELINE} is stale: run python .ci/proto_check.py and commit it")
        return 1
    baseline.write_bytes(now)
    print(f"wrote proto/{BASELINE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
