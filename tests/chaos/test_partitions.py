"""Parts in networks of their own: what crosses them, and what a cut between them costs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.chaos.network import not_permitted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(not_permitted()), reason=f"no network namespaces here: {not_permitted()}"),
]

ROOT = Path(__file__).parents[2]
TRIALS = (
    "decode two-way-partition decoding",
    "prefill~decode one-way-partition shipping",
    "prefill~decode lasting-cut shipping",
)


def inside(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs it where `enter` would."""
    return subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=540
    )


def test_partitions_cost_a_pause(tmp_path):
    out = tmp_path / "lines.txt"
    done = inside(
        "-m", "loadtest.chaos", "--only", ", ".join(TRIALS), "--out", str(out), "--folder", str(tmp_path / "logs")
    )
    lines = out.read_text().splitlines()
    assert {line.partition(":")[0] for line in lines} == set(TRIALS), done.stderr
    assert all(": 0|0|0|" in line for line in lines), lines
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_cross_the_network_and_what_is_cut_does_not(tmp_path):
    done = inside("-m", "tests.chaos.crossing", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("tc") is None, reason="there is no `tc` (Debian: iproute2)")
def test_a_hand_off_whose_network_is_cut_for_good_takes_another_way(tmp_path):
    done = inside("-m", "tests.chaos.lasting_cut", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
