"""Runs a target's tests against one mutant, in a fork of a process that has imported what takes long."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.mutation.targets import Target

WARM = (
    *("torch", "numpy", "grpc.aio", "pydantic_settings", "hypothesis.stateful", "google.protobuf.message"),
    *("aiohttp", "httpx", "jinja2", "openai", "tokenizers", "uvicorn", "yaml"),
)
"""Imported before the forks, where they are installed: none starts a thread or knows our code."""

FLAGS = (
    *("-x", "-q", "-p", "no:cacheprovider", "--tb=short"),
    *("-m", "not slow and not timing and not gpu"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of plugins that were imported before the fork
)


class Outcome(StrEnum):
    """What became of a mutant; all but SURVIVED count as killed."""

    FAILED = "failed"  # a test failed
    BROKEN = "broken"  # the code or its tests could not be imported any more
    ENDLESS = "endless"  # the tests took several times as long as without the mutant
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run is given up. Neither counts what a busy machine takes longer."""

    cpu_s: int
    waiting_s: float  # in which no thread could have run


FIRST = Limits(cpu_s=600, waiting_s=300.0)
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of the tests."""

    outcome: Outcome
    cpu_s: float
    waiting_s: float
    failed: str = ""  # the test that noticed
    durations_s: dict[str, float] = field(default_factory=dict)  # of each test
    output: str = ""

    def limits(self) -> Limits:
        """For runs with a mutant, after this one without."""
        return Limits(cpu_s=int(4 * self.cpu_s) + 10, waiting_s=4 * self.waiting_s + 20)


class _Notes:
    """A pytest plugin: short tests first, examples of Hypothesis drawn alike each time and never shrunk."""

    def __init__(self, durations_s: dict[str, float]) -> None:
        self._known_s = durations_s
        self.durations_s: dict[str, float] = {}
        self.failed = ""

    def pytest_sessionstart(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", deadline=None, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutation")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._known_s.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations_s[report.nodeid] = self.durations_s.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = report.nodeid


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, with a text of its own."""

    def __init__(self, root: Path, path: str, text: str) -> None:
        self.module = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
        self._path = str(root / path)
        self._text = text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        text, file = self._text, self._path

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> types.CodeType:
                return compile(text, file, "exec", dont_inherit=True)

        return importlib.util.spec_from_file_location(fullname, file, loader=Loader(fullname, file))


def warm_up() -> None:
    """Imports what each run would import anew."""
    for name in WARM:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def run_tests(target: Target, path: str, text: str, limits: Limits, durations_s: dict[str, float]) -> Ran:
    """Runs the target's tests with this text in the place of that file's. Blocks until they end or are ended."""
    with tempfile.TemporaryDirectory() as folder:
        notes, output = Path(folder) / "notes.json", Path(folder) / "output"
        pid = _forked(lambda: _child(target, path, text, limits, durations_s, notes), output)
        status, cpu_s, waiting_s = _wait(pid, limits.waiting_s)
        said = json.loads(notes.read_text()) if notes.exists() else {"failed": "", "durations_s": {}}
        return Ran(
            _outcome(status), cpu_s, waiting_s, said["failed"], said["durations_s"], output.read_text(errors="replace")
        )


def _outcome(status: int | None) -> Outcome:
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return Outcome.ENDLESS
    if not os.WIFEXITED(status):
        return Outcome.FAILED  # a crash
    code = os.WEXITSTATUS(status)
    return {0: Outcome.SURVIVED, 1: Outcome.FAILED}.get(code, Outcome.BROKEN)


def _forked(child: Callable[[], int], output: Path) -> int:
    """Starts a child in a process group of its own; its output goes to the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        for fd in (1, 2):
            os.dup2(file, fd)
        code = child()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _child(target: Target, path: str, text: str, limits: Limits, durations_s: dict[str, float], notes: Path) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    finder = _Finder(target.root, path, text)
    if finder.module in sys.modules:
        raise RuntimeError(f"{finder.module} was imported before its mutant")
    os.chdir(target.root)
    sys.meta_path.insert(0, finder)
    plugin = _Notes(durations_s)
    code = int(pytest.main([*FLAGS, *target.tests], plugins=[plugin]))
    notes.write_text(json.dumps({"failed": plugin.failed, "durations_s": plugin.durations_s}))
    return code


def _wait(pid: int, most_waiting_s: float) -> tuple[int | None, float, float]:
    """The exit status, None where it waited for too long, then processor and waiting seconds. The child's group ends
    with it."""
    descriptor, ended, waiting_s = os.pidfd_open(pid), False, 0.0
    try:
        while not ended and waiting_s < most_waiting_s:
            ended = bool(select.select([descriptor], [], [], _LOOK_S)[0])
            waiting_s += _LOOK_S * (not ended and _waits(pid))
    finally:  # also where this process is interrupted
        os.close(descriptor)
        os.killpg(pid, signal.SIGKILL)  # and what its tests started and did not end; until wait4 the number is ours
    _, status, usage = os.wait4(pid, 0)
    return status if ended else None, usage.ru_utime + usage.ru_stime, waiting_s


def _waits(pid: int) -> bool:
    """True where each thread of the process and of those that it started waits for an event, not for a processor; one
    that was stopped does not."""
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            children = (thread / "children").read_text().split()
            if state in "RDTt" or not all(_waits(int(child)) for child in children):
                return False
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return False
    return True
