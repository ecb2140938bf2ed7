"""`make gpu-check` on a GPU machine as described here: every step gets as far as the GPU with what that machine has."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.bench.gpu_check.__main__ import check, look
from loadtest.bench.gpu_check.record import CheckRecord
from loadtest.bench.gpu_check.steps import PROFILED, SANITIZED, SMOKE, steps

ROOT = Path(__file__).parents[4]
THERE = (
    "torch", "triton", "numpy", "safetensors", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments",
    "xdist", "execnet", "pytest_timeout", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec",
    "typing_extensions", "setuptools", "_distutils_hack", "pkg_resources", "torchgen", "functorch", "py", "nvidia",
)  # fmt: skip
"""Its packages, of those that these sources ask for; a Python without network and without Tandem's set-up."""
OURS = {"shared", "services", "loadtest", "tandem", "models", "tests"}
REFUSING = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is absent", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find no other package than those, and no GPU."""
    absent = sorted(importlib.metadata.packages_distributions().keys() - {*THERE, *OURS})
    assert {"ucxx", "redis", "pydantic", "opentelemetry", "grpc", "msgspec"} <= set(absent)
    (tmp_path / "sitecustomize.py").write_text(f"ABSENT = {set(absent)!r}\n{REFUSING}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.usefixtures("bare")
def test_every_step_gets_as_far_as_the_gpu_with_that_machines_packages(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    record = CheckRecord(out, look())
    assert record.machine["gpu"] is None
    elsewhere = (
        "tuning",
        "sanitizer",
        "cluster",
        "handoff",
    )  # other flags of what another step runs too; packages of the kit
    planned = [step for step in steps(out) if step.name not in elsewhere]
    needs_no_gpu = [step.name for step in planned if not step.gpu]
    # As if there were one, and no program but Python.
    patient = [replace(step, gpu=False, minutes=10 * step.minutes) for step in planned]
    assert check(patient, record, minutes=600) == []
    assert list(record.outcomes) == [step.name for step in planned]
    for name, found in record.outcomes.items():
        assert "is absent" not in found.output, found.output
        if name in ("smoke", "tests", *needs_no_gpu):
            assert found.outcome == "passed", found.output
            assert re.search(r"[0-9]+ passed" if name in needs_no_gpu else r"[0-9]+ skipped", found.output)
        elif found.outcome == "skipped":
            assert name == "ncu"
        else:
            assert (found.outcome, found.exit_code) == ("failed", 2), found.output
            assert re.search(r"error: .*torch sees n", found.output)


@pytest.mark.usefixtures("bare")
def test_make_needs_no_set_up_there(tmp_path: Path) -> None:
    """With every rule of the set-up made to fail."""
    calls = [
        ("gpu-check", f"OUT={tmp_path / 'check.json'}", "MINUTES=1", "ONLY=limits engine"),
        ("test-gpu", "ARGS=-q"),
    ]
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")}
    for target, *settings in calls:
        command = ["make", target, f"PYTHON={sys.executable}", "VENV=/nowhere/venv", *settings]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "torch sees no CUDA device" in ran.stdout, ran.stdout


def test_what_is_profiled_sanitized_and_run_first_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "shared" / "kernels").rglob("*jit.py"))
    assert all(f"def {name}(\n" in sources for name in PROFILED)
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    names = re.findall(r"[a-z_]{5,}", f"{SANITIZED} {SMOKE}")
    assert len(names) == 10
    for name in names:
        assert re.search(rf"def test_\w*{name}", tests), name
