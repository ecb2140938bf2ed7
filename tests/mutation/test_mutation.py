"""The mutation tester on a small program of its own: what it counts as noticed, and what it reports as surviving."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed: make setup")

from tests.mutation.__main__ import try_mutants
from tests.mutation.forks import Limits, run_tests
from tests.mutation.mutants import mutants
from tests.mutation.results import JUDGED
from tests.mutation.targets import ROOT, TARGETS, Target
from tests.waiting import DEADLINE_S

SOURCE = """from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    low: int | None
    high: int


def clamp(value: int | float, high: int = 10) -> int | None:
    while value > high:
        value -= 1
    if value < 0 and high > 5:
        return 0
    return value
"""
TESTS = """from clamped.clamp import clamp


def test_it_stays_below():
    assert [clamp(v) for v in (-1, 3, 10, 12)] == [0, 3, 10, 10]
"""
WIDER = """from clamped.clamp import clamp


def test_low_bounds_do_not_lift():
    assert clamp(-1, 6) == 0
"""


@pytest.fixture
def program(tmp_path: Path) -> Target:
    (tmp_path / "clamped").mkdir()
    (tmp_path / "clamped" / "__init__.py").touch()
    (tmp_path / "clamped" / "clamp.py").write_text(SOURCE)
    (tmp_path / "test_clamp.py").write_text(TESTS)
    (tmp_path / "test_wider.py").write_text(WIDER)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    return Target("clamp", ("clamped",), ("test_clamp.py",), root=tmp_path)


def test_nothing_is_changed_that_decides_nothing(program: Target) -> None:
    texts = {mutant.text(program.root) for mutant in mutants(program) if "Decorator" not in mutant.operator}
    assert texts
    for kept in ("frozen=True, slots=True", "low: int | None", "value: int | float, high: int", "-> int | None"):
        assert all(kept in text for text in texts), kept


@pytest.mark.slow
def test_every_mutant_ends_as_noticed_or_as_a_survivor(program: Target) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.test_mutation", str(program.root)],
        cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"survives": "survived", "fails": "failed",
        "is no Python": "broken", "never ends": "endless", "waits": "endless", "crashes": "failed",
        "fails in wider tests": "test_wider.py::test_low_bounds_do_not_lift"}  # fmt: skip


def _run_each(root: Path) -> dict[str, str]:
    """In a process that has not imported the program."""
    sys.path.insert(0, str(root))
    target = Target("clamp", ("clamped",), ("test_clamp.py",), root=root)
    texts = {
        "survives": SOURCE.replace("high > 5", "high > 6"),
        "fails": SOURCE.replace("value < 0", "value > 0"),
        "is no Python": SOURCE.replace("while", "whale"),
        "never ends": SOURCE.replace("value -= 1", "value -= 0"),
        "waits": SOURCE.replace("return 0", "__import__('threading').Event().wait()"),
        "crashes": SOURCE.replace("return 0", "__import__('os').abort()"),
    }
    found = {
        name: str(run_tests(target, "clamped/clamp.py", text, Limits(cpu_s=3, waiting_s=5.0), {}).outcome)
        for name, text in texts.items()
    }
    target = replace(target, wider=("test_wider.py",))
    survivor = next(mutant for mutant in mutants(target) if mutant.text(root) == texts["survives"])
    found["fails in wider tests"] = next(try_mutants(target, [survivor])).failed
    return found


def test_every_target_has_its_files_and_its_tests() -> None:
    for target in TARGETS:
        assert target.files(), target.name
        assert all((ROOT / test.partition("::")[0]).exists() for test in target.tests + target.wider), target.name


def test_every_survivor_that_was_judged_is_still_in_its_file() -> None:
    for name in json.loads(JUDGED.read_text()):
        path, _, change = name.partition(": ")
        assert (ROOT / path).exists(), name
        lines, text = change.partition(" -> ")[0].split(" / "), (ROOT / path).read_text()
        assert all(line in text for line in lines), name


if __name__ == "__main__":
    print(json.dumps(_run_each(Path(sys.argv[1]))))
