"""What the benchmark measures by its flags, and how it tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.prefix.clusters import Setup
from loadtest.bench.prefix.hits import HitRun
from loadtest.bench.prefix.losses import Losses
from loadtest.bench.prefix.measure import Fleets, hit_setups
from loadtest.bench.prefix.ttft import ttft_setups

MODEL = Path("model")


def test_workers_share_the_same_blocks_and_one_alone_has_no_choice():
    fleets = Fleets(workers=[1, 2, 4], blocks=8192, store_blocks=4096, parts=("index", "no-index", "store"))
    setups = list(hit_setups(fleets, MODEL))
    assert {setup.num_workers * setup.pool_blocks for setup in setups} == {8192}
    assert [setup.num_workers for setup in setups if not setup.indexed] == [2, 4]
    assert [setup.store_blocks for setup in setups if setup.num_workers == 1] == [0, 4096]


def test_every_link_is_fetched_over_in_both_ways():
    setups = {setup.name: setup for setup in ttft_setups()}
    assert len(setups) == 8
    assert setups["no store"].store_blocks == 0
    assert setups["store, 100 Mbit/s, both"].send_bytes_per_s == 12.5e6
    assert setups["store, 100 Mbit/s, both"].prefix_fetch == "auto"


def test_what_was_fetched_is_told_beside_what_was_local():
    run = HitRun(
        Setup("x", MODEL, 2, 64), 10, 2000, 600, {"peer": 100, "host": 50}, 640, 700, 800, Losses(0, 0, 0), 1.0
    )
    assert run.num_local_tokens == 450
    assert run.ratio == pytest.approx(600 / 640)
    values = {result.name: result.value for result in run.results()}
    assert values["x: fleet hit rate"] == pytest.approx(30.0)
    assert values["x: hits, peer"] == 100


def test_without_anything_to_hit_the_fleet_is_ideal():
    run = HitRun(Setup("x", MODEL, 1, 64), 1, 20, 0, {}, 0, 0, 0, Losses(0, 0, 0), 1.0)
    assert run.ratio == 1.0
