"""`make gpu-check OUT=file`: everything that first minutes on a GPU should tell, one step after the other.

A GPU may be at hand for minutes, so a call ends within its `--minutes`. A further call with the same `--out` runs the
steps that are left, also after one was killed. Each step is a process of its own with a limit; two calls of 9.5
minutes hold all limits. Needs torch alone: a step whose packages, programs or GPU are absent is skipped by name. What
`make gpu-kit` packed is used where it lies in `out/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from loadtest.bench.gpu_check import kit
from loadtest.bench.gpu_check.record import FAILED, PASSED, SKIPPED, TOO_LONG, CheckRecord, Outcome
from loadtest.bench.gpu_check.steps import CheckStep, step_figures, step_log, steps
from loadtest.rig.command_line import Option, names
from loadtest.rig.command_line import run as run_command
from shared.errors import ConfigError
from shared.parent_death import command_dying_with_parent

EXIT_FAILED, EXIT_LEFT = 1, 3
_MARGIN_S = 5.0
"""Between the end of the last step and the end of the call."""
_PROBE = """
import json, platform, torch
from importlib.metadata import version, PackageNotFoundError
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
gpu = torch.cuda.is_available()
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "gpu": torch.cuda.get_device_name() if gpu else None,
    **{name: of(name) for name in ("triton", "numpy", "safetensors", "pytest", "pytest-xdist", "pytest-timeout")},
}))
"""


def look(python: str = sys.executable) -> dict[str, Any]:
    """The versions that the steps will meet, and `gpu`: its name or None.

    Raises ConfigError where torch does not start.
    """
    try:
        found = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise ConfigError(f"torch does not start with {python}: {lines[-1] if lines else error}") from error
    machine: dict[str, Any] = json.loads(found.stdout)
    return machine


def run(step: CheckStep, record: CheckRecord) -> Outcome:
    """Runs a step to its end or its limit; its children end with it."""
    begun = record.begin(step.name, " ".join(step.command))
    step_figures(record.path).unlink(missing_ok=True)
    begin = time.monotonic()
    with step_log(record.path).open("wb") as output:  # not a pipe: a child that outlives the step would keep it open
        exit_code = _exit_code(step, output.fileno())
    outcome = TOO_LONG if exit_code is None else FAILED if exit_code else PASSED
    return record.end(begun, outcome, time.monotonic() - begin, exit_code)


def _exit_code(step: CheckStep, output: int) -> int | None:
    """None where the limit passed."""
    environment = os.environ | step.environment | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        # Where this process is killed, its step dies too: a further call must have the GPU alone.
        command_dying_with_parent(["/usr/bin/env", *step.command]),
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
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


def check(planned: Sequence[CheckStep], record: CheckRecord, minutes: float) -> list[str]:
    """Runs the steps that have not ended yet and whose limit fits into what is left of the minutes.

    Returns:
        The names of those that are left for a further call.
    """
    end, left = time.monotonic() + 60 * minutes - _MARGIN_S, []
    for number, step in enumerate(planned, 1):
        before = record.outcomes.get(step.name)
        label = f"[{number}/{len(planned)}] {step.name}"
        if before is not None and before.is_final:
            print(f"{label}: {before.outcome} in an earlier call", flush=True)
        elif missing := step.missing(record.machine["gpu"] is not None):
            record.add(Outcome(step.name, " ".join(step.command), SKIPPED, 0.0, None, missing))
            print(f"{label}: skipped, {missing}", flush=True)
        elif time.monotonic() + 60 * step.minutes > end:
            left.append(step.name)
        else:
            print(f"{label}, at most {step.minutes:g} min …", flush=True)
            ended = run(step, record)
            print(f"    {ended.outcome} after {ended.seconds:g} s", flush=True)
    return left


def main(
    out: Annotated[Path, Option("the report, JSON, from which a further call continues; a step's files lie beside it")],
    minutes: Annotated[float, Option("of this call; a step whose limit no longer fits is left for the next")] = 20.0,
    only: Annotated[str, Option("these steps")] = "",
    fresh: Annotated[bool, Option("forget what the report has of these steps")] = False,
) -> int:
    """Runs every step that first minutes on a GPU should have. Status 0: each passed or was skipped; 1: one did not; 3:
    none failed, and some are left for a further call."""
    begin = time.monotonic()
    kit.use()
    known = {step.name: step for step in steps(out)}
    chosen = [known[name] for name in (dict.fromkeys(names(only, "only", known)) or known)]
    out.parent.mkdir(parents=True, exist_ok=True)
    record = CheckRecord.load(out)
    if fresh:
        record.outcomes = {
            name: ended for name, ended in record.outcomes.items() if name not in {s.name for s in chosen}
        }
    record.machine = look()
    print(", ".join(f"{name} {value}" for name, value in record.machine.items()), flush=True)
    left = check(chosen, record, minutes - (time.monotonic() - begin) / 60)
    if left:
        print(f"left for a further call: {' '.join(left)}", flush=True)
    bad = [o.name for step in chosen if (o := record.outcomes.get(step.name)) and o.outcome not in (PASSED, SKIPPED)]
    return EXIT_FAILED if bad else EXIT_LEFT if left else 0


if __name__ == "__main__":
    run_command(main, name="python -m loadtest.bench.gpu_check")
