"""A process that loads a model has its large tensors on large pages, where the system gives any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PROGRAM = """
import torch
from pathlib import Path
from shared.model.decoder import Decoder

decoder = Decoder.load(Path("models/demo"), torch.float32, "cpu")
kept = torch.ones(16 << 20)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


def huge_kib(**environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(
    not _MODES.exists() or "[madvise]" not in _MODES.read_text(),
    reason="the system gives large pages to all or to none",
)
def test_large_tensors_lie_on_large_pages_unless_the_environment_says_no():
    assert huge_kib() >= 32 << 10
    assert huge_kib(THP_MEM_ALLOC_ENABLE="0") == 0
