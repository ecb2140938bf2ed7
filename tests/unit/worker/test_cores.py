"""A worker computes where its settings say, else where the machine's description, its mask and its quota put it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from services.worker.machine.cores import choose_cores, take_cores
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.cores.core_choice import CoreShare
from shared.cores.topology import read_topology
from shared.errors import ConfigError
from tests.unit.cores.machines import laptop, two_sockets

ALL = frozenset(range(16))
NODE1 = (4, 5, 6, 7, 12, 13, 14, 15)


def settings(*flags: str) -> WorkerSettings:
    return load_settings(WorkerSettings, ["--name", "w", "--model", "m", *flags])


@pytest.mark.parametrize(
    ("flags", "quota", "share"),
    [
        ((), None, CoreShare(NODE1, 4, 1)),
        (("--num-threads", "2"), None, CoreShare(NODE1, 2, 1)),
        (("--num-threads", "16"), None, CoreShare((), 16)),  # more than a node has: the whole machine is meant
        (("--cpu-affinity", "0-1,8"), None, CoreShare((0, 1, 8), 2)),
        (("--cpu-affinity", "0-7", "--num-threads", "3"), None, CoreShare(tuple(range(8)), 3)),
        (("--cpu-affinity", "0-7"), 2.0, CoreShare(tuple(range(8)), 2)),
        (("--device", "cuda"), None, CoreShare((), 8)),
        ((), 1.5, CoreShare(NODE1, 1, 1)),
    ],
)
def test_a_worker_on_two_sockets(tmp_path: Path, flags, quota, share) -> None:
    assert choose_cores(settings(*flags), read_topology(two_sockets(tmp_path).root), ALL, quota) == share


def test_a_worker_that_may_use_all_it_wants_is_not_pinned(tmp_path: Path) -> None:
    topology = read_topology(laptop(tmp_path).root)
    assert choose_cores(settings(), topology, frozenset(range(8)), None) == CoreShare((), 4)
    assert choose_cores(settings(), topology, ALL, None) == CoreShare(tuple(range(8)), 4, None)


@pytest.mark.parametrize("text", ["0,x", "5-2", "9999", "99999999999"])
def test_cores_that_are_none_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"cpu_affinity '{text}' does not name cores of this machine") as caught:
        take_cores(settings("--cpu-affinity", text))
    assert caught.value.field == "cpu_affinity"


def test_threads_that_start_later_stay_on_the_same_cores(caplog: pytest.LogCaptureFixture) -> None:
    """Within a thread of its own: only that one and its children are pinned."""
    all_cpus, threads = os.sched_getaffinity(0), torch.get_num_threads()
    chosen = max(all_cpus)
    found: list[object] = []

    def worker() -> None:
        take_cores(settings("--cpu-affinity", str(chosen)))
        child = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        child.start()
        child.join()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=worker)
    with caplog.at_level(logging.INFO):
        thread.start()
        thread.join()
    torch.set_num_threads(threads)
    assert found == [{chosen}, 1]
    assert os.sched_getaffinity(0) == all_cpus
    assert f"w is pinned to CPUs {chosen}, compute threads: 1" in caplog.text
