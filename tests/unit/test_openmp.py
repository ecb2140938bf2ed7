"""How long OpenMP's threads stay awake in a worker, as OpenMP itself tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from shared.kernels.cpu import torch_threads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch_threads._functions() is None, reason="torch's threads here are not OpenMP's"),
]


def told(service: str, **environment: str) -> str:
    """GOMP_SPINCOUNT of a worker's process, from what OpenMP writes as it is loaded."""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ran = subprocess.run(
        [sys.executable, "-m", service, "--help"],
        env={**unset, "OMP_DISPLAY_ENV": "VERBOSE", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OPENMP DISPLAY ENVIRONMENT" in ran.stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", ran.stderr)
    if not found:
        pytest.skip("not GNU's OpenMP")
    return found[1]


@pytest.mark.parametrize("service", ["services.prefill", "services.decode"])
def test_threads_of_a_worker_do_not_stay_awake_for_long(service: str) -> None:
    assert told(service) == "20000"


def test_what_the_user_asks_for_is_kept() -> None:
    assert told("services.decode", GOMP_SPINCOUNT="7") == "7"
    assert told("services.decode", OMP_WAIT_POLICY="passive") != "20000"
