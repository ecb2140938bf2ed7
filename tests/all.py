"""Runs every test, part by part, and says which part failed: `make test-all`, or `python -m tests.all`.

What became of each part is kept in a file, so that `--continue` runs those alone that have not passed. All parts run,
also behind one that failed. Exit status 1 where a part failed; one of which further arguments leave no test has not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STATE = ROOT / "out" / "test-all.json"
MOST_PROCESSES = 8
ALONE = ("--dist", "worksteal")
"""Where no test shares what it starts with the others of its file: an idle process takes over waiting tests."""
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
WITHOUT = "not gpu and not timing"
NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the tests, run by one pytest."""

    name: str
    paths: tuple[str, ...]
    marks: str = f"slow and {WITHOUT} and not k8s"
    without: tuple[str, ...] = ()  # folders below the paths that belong to other parts
    spread: tuple[str, ...] = BY_FILE  # how pytest-xdist shares the tests out
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, num_processes: int, arguments: Sequence[str] = ()) -> list[str]:
        """The pytest that runs it, with further arguments; one process needs no pytest-xdist."""
        processes = ("--numprocesses", str(num_processes), *self.spread) if num_processes > 1 else ()
        ignored = (f"--ignore={folder}" for folder in self.without)
        return [sys.executable, "-m", "pytest", *processes, *ignored, "-m", self.marks, *self.paths, *arguments]


EVERY_SET = (
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/unit/kernels").glob("test_*cpu*.py"))),
    "tests/unit/kernels/test_kv_dtype.py",
    "tests/unit/model/test_kernel_choice.py",
    "tests/integration/engine/test_deterministic.py",
    "tests/integration/engine/test_instruction_sets.py",
    "tests/integration/worker/test_identity.py",
)
"""Tests of the C++ kernels, once more with the emulated instruction sets beside the processor's own."""
PARTS = (
    Part("default", ("tests",), f"not slow and {WITHOUT} and not k8s"),
    Part("kernels", ("tests/unit/kernels",), spread=ALONE),
    Part("instruction sets", EVERY_SET, WITHOUT, environment={"TANDEM_TEST_EMULATED": "1"}),
    Part("unit", ("tests/unit",), without=("tests/unit/kernels",)),
    Part("engine", ("tests/integration/engine",), spread=ALONE),
    Part("integration", ("tests/integration",), without=("tests/integration/engine", "tests/integration/loadtest")),
    Part("loadtest", ("tests/integration/loadtest",)),
    Part("e2e", ("tests/e2e",), spread=ALONE),
    Part("chaos", ("tests/chaos",), spread=ALONE),
    Part("fuzz", ("tests/fuzz", "tests/mutation")),
    Part("page", ("tests/page",)),
    Part("k8s", ("tests/k8s",), f"k8s and {WITHOUT}"),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a part."""

    part: str
    status: int  # pytest's exit status
    minutes: float


class State:
    """What became of the parts, in a JSON file: it outlives a run that is ended half-way."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, Ended]:
        """By the part's name; empty where nothing was run."""
        if not self._path.exists():
            return {}
        return {row["part"]: Ended(**row) for row in json.loads(self._path.read_text())}

    def save(self, ended: Mapping[str, Ended]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps([asdict(each) for each in ended.values()], indent=1) + "\n")


def run(part: Part, num_processes: int, arguments: Sequence[str]) -> Ended:
    """Blocks until its tests have ended."""
    print(f"== {part.name}", flush=True)
    begun = time.monotonic()
    command = part.command(num_processes, arguments)
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **part.environment}, check=False).returncode
    if arguments and status == NO_TESTS:
        status = 0
    return Ended(part.name, status, round((time.monotonic() - begun) / 60, 1))


def table(ended: Mapping[str, Ended]) -> str:
    """A line a part: its name, passed or failed, minutes."""
    width = max(map(len, ended), default=0)
    return "\n".join(
        f"{each.part:{width}}  {'failed' if each.status else 'passed'}  {each.minutes:6.1f} min"
        for each in ended.values()
    )


def chosen(only: str, with_kubernetes: bool) -> list[Part]:
    """The parts of these names, separated by commas; without names all that can run here. Raises ValueError."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := set(names) - {part.name for part in PARTS}:
        raise ValueError(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if (part.name in names if names else with_kubernetes or part.name != "k8s")]


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] | None = None, state: Path = STATE) -> int:
    """Runs the parts. Exit status: 0, or 1 where one failed, now or in the run that is continued."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.all",
        description="Run every test, part by part. What it does not know goes to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", default="", help="names of parts, separated by commas; empty = all")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="leave out what has passed before")
    parser.add_argument("--kubernetes", action="store_true", help="its programs are here: run k8s too")
    parser.add_argument("--processes", type=int, default=min(MOST_PROCESSES, (os.cpu_count() or 1) + 1))
    given, further = parser.parse_known_args(arguments)
    try:
        wanted = chosen(given.only, given.kubernetes) if parts is None else parts
    except ValueError as error:
        parser.error(str(error))
    file = State(state)
    ended = file.load()
    passed = {name for name, each in ended.items() if not each.status} if given.go_on else set()
    for part in wanted:
        if part.name not in passed:
            ended[part.name] = run(part, given.processes, further)
            file.save(ended)
    asked_for = {part.name: ended[part.name] for part in wanted}
    print(f"\n{table(asked_for)}")
    return int(any(each.status for each in asked_for.values()))


if __name__ == "__main__":
    sys.exit(main())
