"""The comparison of systems: its model, its table."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.baseline.calibration import Alone, Sample
from loadtest.baseline.interleaved import Candidate, InterleavedSearch, best_of_each_system, rate_for_all
from loadtest.baseline.outcome import common_rate, outcome_rows, write_figures, write_outcome
from loadtest.baseline.study import Budget
from loadtest.baseline.systems import SYSTEMS, make_cluster
from loadtest.config import LoadConfig
from loadtest.rate_search import Point, SearchSpace
from loadtest.rig.models import SERVED, write_model
from loadtest.run import RunResult
from loadtest.sweep import Sweep
from loadtest.workloads.spec import TraceOptions, parse_workload
from shared.errors import ConfigError, WorkerLost
from shared.model.config.model_config import ModelConfig
from tests.unit.loadtest.factories import answered, broken, result

DEMO = Path(__file__).parents[3] / "models" / "demo"
TINY = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


def test_a_model_is_written_once_and_can_be_served(tmp_path: Path) -> None:
    write_model(tmp_path / "m", TINY, DEMO)
    config = ModelConfig.load(tmp_path / "m")
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.head_dim) == (32, 2, 2, 8)
    assert (tmp_path / "m" / "tokenizer.json").exists()
    before = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    write_model(tmp_path / "m", TINY, DEMO)
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == before


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        write_model(tmp_path / "m", SERVED["s"], tmp_path)


def test_every_system_has_the_same_memory_for_kv(tmp_path: Path) -> None:
    totals = {
        system.name: make_cluster(system, DEMO, 128, 4096, tmp_path).spec.num_kv_blocks * system.num_workers
        for system in SYSTEMS
    }
    assert set(totals.values()) == {4096}
    assert [system.mode for system in SYSTEMS] == ["disaggregated", "collocated", "collocated"]


async def no_run(config: LoadConfig, folder: str) -> RunResult:
    raise AssertionError("nothing is run")


def candidate(index: int, rates: dict[float, float], folder: Path, chunk_len: int = 128) -> Candidate:
    """A system with its attainment at some rates."""
    run = result([answered(i, sent_s=float(i)) for i in range(10)])
    sweep = Sweep(run.config, SearchSpace())
    for rate, attainment in rates.items():
        sweep.add(rate, f"rate-{rate:g}", run)
        sweep.points[-1] = Point(rate, rate, rate * attainment, attainment)
        sweep.rows[-1] |= {"attainment": attainment, "goodput": rate * attainment}
    folder.mkdir(parents=True)
    return Candidate(SYSTEMS[index], chunk_len, folder, sweep, no_run)


def test_the_table_compares_at_the_highest_rate_that_all_could_serve(tmp_path: Path) -> None:
    found = [
        candidate(0, {2.0: 1.0, 4.0: 0.95, 8.0: 0.3}, tmp_path / "trace" / "a"),
        candidate(1, {2.0: 0.9, 4.0: 0.5, 1.0: 1.0}, tmp_path / "trace" / "b"),
        candidate(2, {2.0: 0.95, 4.0: 0.1}, tmp_path / "trace" / "c"),
        candidate(2, {3.0: 0.2}, tmp_path / "trace" / "d", chunk_len=512),
    ]
    best = best_of_each_system(found)
    assert best == found[:3]
    assert common_rate(best) == 2.0
    rows = outcome_rows(best, 2.0)
    assert [row[2] for row in rows] == ["3.80", "1.80", "1.90"]
    assert [row[3:5] for row in rows] == [["4", "8"], ["2", "4"], ["2", "4"]]
    assert [row[5] for row in rows] == ["2.00", "1.00", "none"]
    assert all("-" not in row[6:] for row in rows)
    text = write_outcome(tmp_path, {"trace": found, "long-prompts": []})
    assert "## trace, latencies at 2 req/s" in text
    assert "| 1 prefill + 1 decode | 128 | 3.80 |" in text
    assert "| 1 collocated, all cores | 512 | none | - | 3 |" in text
    assert (tmp_path / "outcome.md").read_text() == text
    assert (tmp_path / "trace" / "report.html").exists()


def test_systems_that_share_no_rate_within_the_targets_are_compared_at_the_highest_that_they_share(
    tmp_path: Path,
) -> None:
    found = [candidate(0, {2.0: 1.0, 3.0: 0.4}, tmp_path / "a"), candidate(1, {2.0: 0.5, 3.0: 0.2}, tmp_path / "b")]
    assert common_rate(found) == 3.0
    apart = [candidate(0, {2.0: 1.0}, tmp_path / "f" / "c"), candidate(1, {3.0: 1.0}, tmp_path / "f" / "d")]
    assert common_rate(apart) is None
    own = [*apart, candidate(2, {5.0: 0.2}, tmp_path / "f" / "e")]
    rows = outcome_rows(own, None)
    assert [row[3] for row in rows] == ["2", "3", "-"]
    assert [["-" in row[6:]] for row in rows] == [[False], [False], [True]]
    assert "latencies at the rate that each one met" in write_outcome(tmp_path, {"f": own})
    write_figures(tmp_path / "figures.json", {"f": own})
    names = {result["name"] for result in json.loads((tmp_path / "figures.json").read_text())["results"]}
    assert any(name.endswith("TTFT p50 at 3 req/s") for name in names)
    assert rate_for_all(apart) == 2.0
    assert rate_for_all(found) is None


def test_figures_for_scripts_name_the_best_baseline_as_the_peer(tmp_path: Path) -> None:
    found = [
        candidate(0, {2.0: 1.0, 4.0: 0.1}, tmp_path / "a"),
        candidate(1, {2.0: 0.9, 4.0: 0.5}, tmp_path / "b"),
        candidate(2, {2.0: 1.0, 4.0: 1.0}, tmp_path / "c"),
    ]
    write_figures(tmp_path / "figures.json", {"trace": found})
    results = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert results[0] == {
        "name": "trace, 1 prefill + 1 decode, chunks of 128: max goodput",
        "value": 2.0,
        "unit": "req/s",
        "peer": "1 collocated, all cores",
        "ratio": 0.5,
    }
    assert len(results) == 3 * 5
    assert {result["unit"] for result in results} == {"req/s", "ms"}


class Clock:
    """Time that passes when something is run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def candidates(clock: Clock, limits: list[float], point_s: float, order: list[str], **space: float) -> list[Candidate]:
    """Systems that meet the targets up to a rate; a run of theirs takes `point_s`."""

    def made(index: int, limit: float) -> Candidate:
        async def run_point(config: LoadConfig, folder: str) -> RunResult:
            clock.now_s += point_s
            order.append(f"{index}:{config.traffic.rate:g}")
            late = 0.1 if (config.traffic.rate or 0) <= limit else 1.0
            return result([answered(i, sent_s=float(i), times_s=(i + late, i + late + 0.01)) for i in range(10)])

        sweep = Sweep(result([]).config, SearchSpace(**space))  # type: ignore[arg-type]
        return Candidate(SYSTEMS[index], 128, Path(), sweep, run_point)

    return [made(index, limit) for index, limit in enumerate(limits)]


async def test_systems_take_turns() -> None:
    order: list[str] = []
    clock = Clock()
    found = candidates(clock, [3.0, 1.0, 5.0], 10.0, order, start_rate=1.0, tolerance=0.5)
    await InterleavedSearch(found, lambda candidate, point: None, 10.0, clock).search(1e6)
    assert order[:6] == ["0:1", "1:1", "2:1", "0:2", "1:2", "2:2"]
    assert [e.best.rate for e in found if e.best is not None] == [2.828, 1.0, 4.0]


@settings(max_examples=25)
@given(st.floats(0, 400), st.floats(1, 30), st.integers(0, 3))
def test_a_search_ends_in_time_but_measures_every_candidate_once(deadline_s: float, point_s: float, after: int) -> None:
    order: list[str] = []
    clock = Clock()
    found = candidates(clock, [3.0, 1.0, 5.0], point_s, order, start_rate=1.0, max_points=30)
    asyncio.run(
        InterleavedSearch(found, lambda candidate, point: None, point_s, clock).search(deadline_s, points_after=after)
    )
    assert {name[0] for name in order} == {"0", "1", "2"}
    assert clock.now_s <= max(deadline_s - after * point_s, 3 * point_s) + 1e-6


async def test_who_was_not_measured_at_the_common_rate_is() -> None:
    order: list[str] = []
    clock = Clock()
    found = candidates(clock, [3.0, 1.0, 5.0], 10.0, order, start_rate=1.0, max_points=2)
    search = InterleavedSearch(found, lambda candidate, point: None, 10.0, clock)
    await search.search(1e6)
    del order[:]
    await search.at_rate(2.0)
    await search.at_rate(1.5)
    assert order == ["0:1.5", "1:1.5", "2:1.5"]


def test_time_that_one_search_leaves_goes_to_those_behind_it() -> None:
    budget = Budget(ends_s=100.0, weights=[1.0, 1.0, 0.5], reserved_s=[20.0])
    assert budget.next_deadline(0.0) == pytest.approx(32.0)
    assert budget.next_deadline(20.0) == pytest.approx(20.0 + 60.0 / 1.5)
    budget.reserved_s.pop()
    assert budget.next_deadline(70.0) == pytest.approx(100.0)
    late = Budget(ends_s=10.0, weights=[1.0])
    assert late.next_deadline(15.0) == 15.0


def test_targets_are_twice_what_one_request_alone_takes() -> None:
    alone = Alone.of([answered(i, sent_s=0.0, times_s=[0.1 + i / 100, 0.2 + i / 100]) for i in range(8)])
    assert (alone.slo().ttft_s, alone.slo().tpot_s) == (0.34, 0.2)
    assert alone.start_rate(2) == 4.3
    with pytest.raises(WorkerLost, match="no request of the calibration"):
        Alone.of([broken()])


def test_a_sample_stands_for_all_lengths_of_a_workload() -> None:
    workload = parse_workload("random:input=64-256@0.7+1024-1984@0.3,output=16", TraceOptions())
    lengths = [c.turns[0].num_new_tokens for c in Sample(workload).conversations(np.random.default_rng(3))]
    assert len(lengths) == 8
    assert lengths == sorted(lengths)
    assert sum(length >= 1024 for length in lengths) in (2, 3)
