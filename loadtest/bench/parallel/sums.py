"""Sums over ranks: shared memory beside gloo and beside copying the same bytes once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from loadtest.bench.parallel.rank import SIZES
from loadtest.figures import Result
from shared.errors import Internal
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.group import group_bytes, shared_memory
from shared.kernels.cpu.launch import load
from shared.sizes import size as shown

GOAL_BYTES, GOAL_RATIO = 64 << 10, 5.0
"""At this size, sums through shared memory are to take a fifth of gloo's time."""


def measure_sums(num_ranks: int, pairs: int, repeats: int) -> list[Result]:
    """Each size's median over `pairs` runs of both, one after the other."""
    runs = [(_run("shared-memory", num_ranks, repeats), _run("gloo", num_ranks, repeats)) for _ in range(pairs)]
    results = []
    for num_bytes in SIZES:
        ours = median(own[num_bytes] for own, _ in runs)
        ratio = median(gloo[num_bytes] / own[num_bytes] for own, gloo in runs)
        copied = _copy_s(num_bytes)
        name = f"sum of {shown(num_bytes)} over {num_ranks} ranks"
        results.append(Result(name, ours * 1e6, "us", copied * 1e6, copied / ours, "gloo", ratio))
    return results


def _run(kind: str, num_ranks: int, repeats: int) -> dict[int, float]:
    """Bytes → seconds. Raises Internal where a rank fails."""
    with tempfile.TemporaryDirectory(prefix="tandem-parallel-") as folder:
        descriptor = shared_memory(group_bytes(load(choose()[1]), num_ranks))
        place = str(Path(folder, "store")) if kind == "gloo" else str(descriptor)
        module = "loadtest.bench.parallel.rank"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, kind, place, str(rank), str(num_ranks), str(repeats)],
                pass_fds=[descriptor],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        os.close(descriptor)
        printed = ranks[0].communicate()[0]
        if any(rank.wait() for rank in ranks):
            raise Internal(f"a rank of {num_ranks} failed to add up by {kind}")
    return {int(num_bytes): seconds for num_bytes, seconds in json.loads(printed).items()}


def _copy_s(num_bytes: int) -> float:
    """Median seconds of one copy by one thread."""
    source, target, times = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4), []
    for _ in range(50):
        begin = perf_counter()
        target.copy_(source)
        times.append(perf_counter() - begin)
    return median(times)
