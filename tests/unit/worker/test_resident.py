"""A worker's resident memory is the system's own figure, read once a second, and unknown rather than zero."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import psutil

from services.worker.telemetry.load import REFRESH_S, ResidentMemory

PAGE = os.sysconf("SC_PAGE_SIZE")


def test_the_figure_is_read_again_only_after_a_second(tmp_path: Path) -> None:
    statm = tmp_path / "statm"
    statm.write_text("900 70 30 1 0 80 0\n")
    memory = ResidentMemory(statm)
    assert memory.num_bytes(5.0) == 70 * PAGE
    statm.write_text("900 90 30 1 0 80 0\n")
    assert memory.num_bytes(5.0 + REFRESH_S / 2) == 70 * PAGE
    assert memory.num_bytes(5.0 + REFRESH_S) == 90 * PAGE


def test_a_system_without_the_file_has_no_figure(tmp_path: Path) -> None:
    memory = ResidentMemory(tmp_path / "statm")
    assert memory.num_bytes(0.0) is None
    (tmp_path / "statm").write_text("nonsense\n")
    assert memory.num_bytes(REFRESH_S) is None


def test_memory_that_is_touched_shows() -> None:
    held = 64 << 20
    memory = ResidentMemory()
    before = memory.num_bytes(0.0)
    with mmap.mmap(-1, held) as touched:  # of its own: what the heap has freed may still be resident
        for place in range(0, held, PAGE):
            touched[place] = 1
        after = memory.num_bytes(REFRESH_S)
        rss = psutil.Process().memory_info().rss
    assert before is not None
    assert after is not None
    assert after - before > held // 2
    assert abs(after - rss) < held
