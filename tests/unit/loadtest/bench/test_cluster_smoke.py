"""The benchmarks' clusters on one GPU: workers accept what each way of hand-off starts them with."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.cluster_smoke import DIRECT, Way, ways
from services.local.cluster import LocalCluster
from services.local.commands import plan_workers
from services.local.spec import DEMO_MODEL
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.cores.core_choice import CoreShare


def settings_of(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> list[WorkerSettings]:
    """As its workers read them, from their flags and their environment."""
    for name, value in cluster._environment.items():
        monkeypatch.setenv(name, value)
    plans = plan_workers(cluster.spec, [CoreShare((), 1)] * cluster.spec.num_processes)
    commands = [cluster._commands.worker(plan, "127.0.0.1:1") for plan in plans]
    return [load_settings(WorkerSettings, command[command.index("--name") :]) for command in commands]


@pytest.mark.parametrize("way", ways("cuda:0"))
def test_both_workers_of_each_way_accept_their_settings(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = settings_of(way.cluster("cuda:0", DEMO_MODEL, tmp_path), monkeypatch)
    assert {prefill.name, decode.name} == {"prefill-0", "decode-0"}
    for worker in (prefill, decode):
        assert worker.device == "cuda:0"
        assert worker.sends_from_gpu == (way is DIRECT)
        assert worker.fleet_key.get_secret_value()
    assert prefill.gpu_memory + decode.gpu_memory <= 1
