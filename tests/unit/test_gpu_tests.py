"""The GPU tests start on a machine that has torch, Triton and pytest, and nothing else of the project's packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = (
    "ucxx", "redis", "msgspec", "pydantic", "pydantic_settings", "opentelemetry", "grpc", "google", "yaml", "typer",
    "rich", "psutil", "hypothesis", "pytest_asyncio", "pytest_timeout", "xdist", "transformers", "tokenizers",
    "uvloop", "starlette", "llguidance", "huggingface_hub",
)  # fmt: skip
REFUSING = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_they_are_collected_without_plugins_and_without_the_services_packages(tmp_path: Path) -> None:
    (tmp_path / "absent.py").write_text(REFUSING)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "absent",
        "-q",
        "-c",
        "tests/gpu/pytest.ini",
        "-m",
        "gpu",
        "tests/gpu",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or " skipped" in done.stdout
