"""The steps of `make gpu-check`, in the order of what is most worth knowing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

PROFILED = (
    "decode_parts", "prefill_tiles", "find_peaks", "measure_levels", "refine_levels", "race_and_collect",
    "choose_tokens",
)  # fmt: skip
"""Triton functions that `ncu` looks into: attention and sampling."""
SANITIZED = "mixed_batches and 128-4-16 or blocks_are_copied or tokens_equal or swapped"
"""Tests that read and write every kind of memory, few enough for a tool that slows them down by far."""
SMOKE = "served_by or lengths_come or times_of_tokens or blocks_are_copied or tokens_equal or gives_the_greedy"
"""Tests that run every op of a dense model once."""
COMPILED = "8b_model and sm_90 or other_kernels and sm_90 and dtype0"
"""Compilations of an 8B model's kernels for Hopper, which need no GPU."""
_TEST_LIMIT_S = 90
_MOST_PROCESSES = 16
"""Most processes of tests: a test mostly compiles, on one core, and all share the GPU's memory."""
_ENGINE = ("numpy",)
_SERVICES = (*_ENGINE, "safetensors", "ucxx", "pydantic", "redis", "grpc", "starlette", "shared.rpc.pb")


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One command with its limit, and what has to be there for it; where something is not, the step is skipped."""

    name: str
    command: tuple[str, ...]
    minutes: float
    gpu: bool = True
    program: str = ""
    """Program that the step runs and that is no part of Python."""
    packages: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def missing(self, has_gpu: bool) -> str:
        """Why it cannot run here; empty if it can."""
        if self.gpu and not has_gpu:
            return "torch sees no CUDA device"
        if self.program and shutil.which(self.program) is None:
            return f"{self.program} is not installed"
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(absent)}" if absent else ""


def steps(out: Path, python: str = sys.executable) -> list[CheckStep]:
    """All of them. A benchmark writes its figures into `step_figures(out)`, and `ncu` beside it. Limits are about twice
    what those steps took that have run on an H100 with 16 cores; two calls of 9.5 minutes hold them all."""

    def module(name: str, *flags: str) -> tuple[str, ...]:
        return (python, "-m", name, *flags)

    def tests(chosen: str, *flags: str, folder: str = "tests/gpu") -> tuple[str, ...]:
        # -v: a run that is cut off has said how each test before ended.
        limit = (
            ("-p", "timeout", "--timeout", f"{_TEST_LIMIT_S}", "--timeout-method", "thread")
            if _has("pytest_timeout")
            else ()
        )
        select = ("-k", chosen) if chosen else ()
        return module("pytest", "-c", "tests/gpu/pytest.ini", "-v", *limit, *flags, *select, folder)

    def bench(name: str, *flags: str) -> tuple[str, ...]:
        return module("loadtest.bench", name, *flags)

    def written(name: str, *flags: str) -> tuple[str, ...]:
        return bench(name, *flags, "--out", str(step_figures(out)))

    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    spread = ("-p", "xdist", "-n", str(processes)) if _has("xdist") else ()
    mixed = (
        "--device", "cuda", "--decodes", "1", "32", "128", "--chunk", "64", "128", "256", "512", "1024", "2048",
        "--piecewise-tokens", "1024", "--rounds", "5",
    )  # fmt: skip
    profiler = (
        "ncu", "--kernel-name", f"regex:{'|'.join(PROFILED)}", "--profile-from-start", "off", "--launch-count", "16",
        # Its own default sets the clock, which a machine that is lent does not allow.
        "--set", "full", "--clock-control", "none", "--log-file", str(out.with_name(f"{out.stem}-ncu.txt")),
    )  # fmt: skip
    sanitizer = ("compute-sanitizer", "--tool", "memcheck")
    # From torch's cache of memory every pointer lies in a block that CUDA knows, and nothing is out of bounds.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    engine_tests = (*_ENGINE, "safetensors", "pytest")
    return [
        CheckStep("limits", written("gpu-limits"), 0.4),
        CheckStep("smoke", tests(SMOKE, *spread), 0.8, packages=engine_tests),
        CheckStep("engine", written("engine-cuda"), 1.2, packages=_ENGINE),
        CheckStep("mixed", written("step-times", *mixed), 0.7, packages=_ENGINE),
        CheckStep("kernels", written("kernels"), 1.4, packages=_ENGINE),
        CheckStep("tests", tests("", *spread), 4, packages=engine_tests),
        CheckStep("cluster", written("cluster-smoke"), 1.8, False, packages=_SERVICES),
        CheckStep("handoff", written("gpu-handoff", "--at-once", "2"), 2.6, packages=_SERVICES),
        CheckStep("staging", written("staging", "--device", "cuda"), 0.3, packages=_ENGINE),
        CheckStep("direct", written("gpu-direct"), 0.5, packages=(*_ENGINE, "ucxx")),
        CheckStep("pieces", written("piecewise"), 1, packages=_ENGINE),
        CheckStep("trace", written("gpu-trace"), 0.5, packages=_ENGINE),
        CheckStep("ncu", (*profiler, *bench("gpu-trace", "--layers", "1", "--marked")), 0.8, True, "ncu", _ENGINE),
        CheckStep("sanitizer", (*sanitizer, *tests(SANITIZED)), 0.8, True, sanitizer[0], engine_tests, uncached),
        CheckStep("tuning", written("kernels", "--tune"), 0.8, packages=_ENGINE),
        CheckStep("compile", tests(COMPILED, *spread, folder="tests/unit/kernels/test_triton_compiles.py"), 1, False,
                  packages=(*_ENGINE, "triton", "pytest")),
    ]  # fmt: skip


def step_figures(out: Path) -> Path:
    """Where the step that is under way writes; its figures are in `out` once it has ended."""
    return out.with_name(f"{out.stem}-step.json")


def step_log(out: Path) -> Path:
    """What the step that is under way has printed so far, likewise."""
    return out.with_name(f"{out.stem}-step.log")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
