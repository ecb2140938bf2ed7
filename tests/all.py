"""Runs every test, part by part, and says which part failed: `make test-all`, or `python -m tests.all`.

What became of each part and of each of its tests is kept in files, so that `--continue` runs those alone that have not
passed, also where the run was killed within a part. All parts run, also behind one that failed. Exit status 1 where a
part failed; one of which further arguments leave no test has not.

pytest loads this file as a plugin as well: it writes down which tests pass, and leaves out those that have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ALL

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

    def command(self, num_processes: int, passed: Path, arguments: Sequence[str] = ()) -> list[str]:
        """The pytest that runs it but for what `passed` has, with further arguments; one process needs no xdist."""
        processes = ("--numprocesses", str(num_processes), *self.spread) if num_processes > 1 else ()
        ignored = (f"--ignore={folder}" for folder in self.without)
        kept = ("-p", "tests.all", f"--passed={passed}")  # a word apart would be taken for a folder of tests
        return [sys.executable, "-m", "pytest", *kept, *processes, *ignored, "-m", self.marks, *self.paths, *arguments]


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
    """What became of the parts, in a JSON file, and of their tests, in one a part; a killed run leaves them."""

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

    def passed(self, part: str) -> Path:
        """The file of the part's tests that passed, an id a line."""
        return self._path.with_name(f"{self._path.stem}-{part.replace(' ', '-')}.passed")


class Passed:
    """Leaves out the tests that passed before, and adds each that passes now to a file, if one is given."""

    def __init__(self, before: Collection[str], path: Path | None) -> None:
        self.before = before
        self._path = path
        self._failed: set[str] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self.before]
        items[:] = [item for item in items if item.nodeid not in self.before]
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed and self._path:
            with self._path.open("a") as file:
                file.write(report.nodeid + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, help="leave out the tests that this file has, and add those that pass")


def pytest_configure(config: pytest.Config) -> None:
    path: Path = config.getoption("passed")
    given = getattr(config, "workerinput", None)
    if given is not None:  # a process of pytest-xdist, whose reports the one that started it has too
        passed = Passed(frozenset(given["passed"]), None)
    else:
        passed = Passed(frozenset(path.read_text().splitlines() if path.exists() else ()), path)
    config.pluginmanager.register(passed, "passed")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_configure_node(node: Any) -> None:
    """All of a run's processes leave out the same tests, also one that starts late in place of one that died."""
    node.workerinput["passed"] = sorted(node.config.pluginmanager.get_plugin("passed").before)


def run(part: Part, num_processes: int, passed: Path, arguments: Sequence[str]) -> Ended:
    """Blocks until those of its tests have ended that `passed` does not have."""
    print(f"== {part.name}", flush=True)
    begun = time.monotonic()
    none_is_well = bool(arguments) or passed.exists()
    passed.parent.mkdir(parents=True, exist_ok=True)
    command = part.command(num_processes, passed, arguments)
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **ALL, **part.environment}, check=False).returncode
    if none_is_well and status == NO_TESTS:
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
            if not given.go_on:
                file.passed(part.name).unlink(missing_ok=True)
            ended[part.name] = run(part, given.processes, file.passed(part.name), further)
            file.save(ended)
    asked_for = {part.name: ended[part.name] for part in wanted}
    print(f"\n{table(asked_for)}")
    return int(any(each.status for each in asked_for.values()))


if __name__ == "__main__":
    sys.exit(main())
