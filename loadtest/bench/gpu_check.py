"""`make gpu-check OUT=file`: everything that a first hour on a GPU should tell, one step after the other.

Each step is a process of its own with a limit of at most ten minutes. The report is written after each step, and a step
that fails or takes too long does not stop those behind it. Needs torch, Triton and these sources, pytest for the tests,
and none of the services' packages: `python -m loadtest.bench.gpu_check --out FILE` starts it with any such interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option
from loadtest.rig.command_line import run as run_command
from loadtest.rig.results import write_json

MOST_MINUTES = 10
PROFILED = ("decode_parts", "prefill_tiles", "find_peaks", "measure_levels", "collect_range", "choose_tokens")
"""Triton functions that `ncu` looks into: attention and sampling."""
SANITIZED = "mixed_batches and 128-4-16 or blocks_are_copied or tokens_equal or swapped"
"""Tests that read and write every kind of memory, few enough for a tool that slows them down by far."""
_TAIL = 20_000
"""Characters of a step's output that the report keeps, the last ones."""


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One command with its limit."""

    name: str
    command: tuple[str, ...]
    minutes: float
    needs: str = ""
    """A program that is not part of Python; where it is missing, the step is skipped."""
    package: str = ""
    """A package of Python's that the step is about, likewise."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended."""

    name: str
    command: str
    outcome: str
    """passed, failed, too long, or skipped."""
    seconds: float
    exit_code: int | None
    output: str
    figures: object = None
    """What the step wrote where it was told to, if it did."""


def steps(figures: Path, python: str = sys.executable) -> list[CheckStep]:
    """In the order of what is most worth knowing; benchmarks write into the folder `figures`."""

    def module(name: str, *flags: str) -> tuple[str, ...]:
        return (python, "-m", name, *flags)

    def tests(*flags: str) -> tuple[str, ...]:
        # -v: a run that is cut off has said how each test before ended.
        return module("pytest", "-c", "tests/gpu/pytest.ini", "-m", "gpu", "-v", *flags, "tests/gpu")

    def bench(name: str, *flags: str) -> tuple[str, ...]:
        return module("loadtest.bench", name, *flags)

    def written(name: str) -> tuple[str, str]:
        return "--out", str(figures / f"{name}.json")

    profiler = (
        "ncu", "--kernel-name", f"regex:{'|'.join(PROFILED)}", "--profile-from-start", "off", "--launch-count", "16",
        "--set", "full", "--log-file", str(figures / "ncu.txt"),
    )  # fmt: skip
    sanitizer = ("compute-sanitizer", "--tool", "memcheck")
    return [
        CheckStep("versions and limits", bench("gpu-limits", *written("limits")), 2),
        CheckStep("gpu tests", tests(), 8),
        CheckStep("kernel bench", bench("kernels", *written("kernels")), 8),
        CheckStep("engine bench", bench("engine-cuda", *written("engine")), 8),
        CheckStep("step times", bench("step-times", "--device", "cuda", *written("step-times")), 4),
        CheckStep("tuning", bench("kernels", "--tune", *written("tuning")), 8),
        CheckStep("trace of a decode step", bench("gpu-trace", *written("trace")), 3),
        CheckStep("ncu", (*profiler, *bench("gpu-trace", "--layers", "1", "--marked")), 5, "ncu"),
        CheckStep("compute-sanitizer", (*sanitizer, *tests("-k", SANITIZED)), 4, "compute-sanitizer"),
        CheckStep("prompts in pieces", bench("piecewise", *written("piecewise")), 6),
        CheckStep("swap race", tests("-k", "swap"), 2),
        CheckStep("staging rate", bench("staging", "--device", "cuda", *written("staging")), 2),
        CheckStep("direct transfer", bench("gpu-direct", *written("gpu-direct")), 3, package="ucxx"),
    ]


def run(step: CheckStep, figures: Path) -> Outcome:
    """Runs a step to its end or its limit; its children end with it."""
    assert step.minutes <= MOST_MINUTES, f"{step.name} may take {step.minutes} minutes"
    command = " ".join(step.command)
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, command, "skipped", 0.0, None, f"{step.needs} is not installed")
    if step.package and importlib.util.find_spec(step.package) is None:
        return Outcome(step.name, command, "skipped", 0.0, None, f"the package {step.package} is not installed")
    before = {path: path.stat().st_mtime_ns for path in figures.iterdir()}
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:  # not a pipe: a child that outlives the step would keep it open
        exit_code = _exit_code(step, output.fileno())
        seconds = time.monotonic() - begin
        output.seek(0)
        text = output.read().decode(errors="replace")[-_TAIL:]
    outcome = "too long" if exit_code is None else "failed" if exit_code else "passed"
    return Outcome(step.name, command, outcome, round(seconds, 1), exit_code, text, _written(figures, before))


def _exit_code(step: CheckStep, output: int) -> int | None:
    """None where the limit passed."""
    environment = os.environ | step.environment | {"PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(
            step.command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    except OSError as error:
        os.write(output, f"cannot be started: {error}\n".encode())
        return 127
    try:
        return process.wait(60 * step.minutes)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """A step begins a session of its own, so that nothing of it holds the GPU when the next one starts."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _written(figures: Path, before: dict[Path, int]) -> object:
    """The JSON files that a step wrote, by their names without an ending."""
    new = [path for path in sorted(figures.glob("*.json")) if before.get(path) != path.stat().st_mtime_ns]
    found: dict[str, object] = {}
    for path in new:
        try:
            found[path.stem] = json.loads(path.read_text())
        except ValueError as error:  # cut off by the limit
            found[path.stem] = f"unreadable: {error}"
    return found or None


def check(planned: Sequence[CheckStep], out: Path, figures: Path) -> list[Outcome]:
    """Runs all steps and writes the report after each of them."""
    outcomes: list[Outcome] = []
    for number, step in enumerate(planned, 1):
        print(f"[{number}/{len(planned)}] {step.name}, at most {step.minutes:g} min …", flush=True)
        outcomes.append(run(step, figures))
        print(f"    {outcomes[-1].outcome} after {outcomes[-1].seconds:g} s", flush=True)
        write_json(out, {"steps": [asdict(outcome) for outcome in outcomes]})
    return outcomes


def main(
    out: Annotated[Path, Option("the report, JSON; benchmarks write beside it")],
    only: Annotated[str, Option("steps whose name contains this")] = "",
) -> int:
    """Runs every step that a first hour on a GPU should have. Status 0 where every step passed or was skipped."""
    figures = out.parent / f"{out.stem}-figures"
    figures.mkdir(parents=True, exist_ok=True)
    outcomes = check([step for step in steps(figures) if only in step.name], out, figures)
    return int(any(outcome.outcome not in ("passed", "skipped") for outcome in outcomes))


if __name__ == "__main__":
    run_command(main, name="python -m loadtest.bench.gpu_check")
