"""A process from which an instruction set is hidden chooses kernels without it, and still faults as it would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from loadtest.bench.peers.hidden_isa import NEEDS, CannotHide, environment
from shared.kernels.cpu import isa

SEEN = "from numpy._core._multiarray_umath import __cpu_features__ as seen; print(seen['AVX2'], seen['AVX512F'])"
OWN_FAULT = "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)"


def run(program: str, hidden: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **hidden}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def hidden(tmp_path) -> dict[str, str]:
    if NEEDS not in isa.processor_features():
        with pytest.raises(CannotHide, match=NEEDS):
            environment("avx2", tmp_path)
        pytest.skip(f"this processor has no {NEEDS}: that it is refused has been seen")
    return environment("avx2", tmp_path)


def test_libraries_see_the_smaller_processor(hidden) -> None:
    done = run(SEEN, hidden)
    assert (done.stdout.split(), done.returncode) == (["True", "False"], 0), done.stderr


def test_a_fault_of_the_process_is_still_its_own(hidden) -> None:
    done = run(OWN_FAULT, hidden)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
