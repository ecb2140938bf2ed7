"""The comparison of systems: its model, its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.baseline.model import SHAPES, Shape, write_model
from loadtest.baseline.outcome import common_rate, outcome_rows, write_outcome
from loadtest.baseline.study import Measured
from loadtest.baseline.systems import SYSTEMS, make_cluster
from loadtest.rate_search import Point, SearchSpace
from loadtest.results import write_json
from loadtest.sweep import Sweep
from shared.errors import ConfigError
from shared.model.config import ModelConfig
from tests.unit.loadtest.factories import answered, result

DEMO = Path(__file__).parents[3] / "models" / "demo"
TINY = Shape("tiny", hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)


def test_a_model_is_written_once_and_can_be_served(tmp_path: Path) -> None:
    write_model(tmp_path / "m", TINY, DEMO)
    config = ModelConfig.load(tmp_path / "m")
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.head_dim) == (32, 2, 2, 8)
    assert (tmp_path / "m" / "tokenizer.json").exists()
    before = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    write_model(tmp_path / "m", TINY, DEMO)
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == before


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no model folder"):
        write_model(tmp_path / "m", SHAPES["s"], tmp_path)


def test_every_system_has_the_same_memory_for_kv(tmp_path: Path) -> None:
    totals = {
        system.name: make_cluster(system, DEMO, 128, 4096, tmp_path).spec.num_kv_blocks * system.num_workers
        for system in SYSTEMS
    }
    assert set(totals.values()) == {4096}
    assert [system.mode for system in SYSTEMS] == ["disaggregated", "collocated", "collocated"]


def measured(index: int, rates: dict[float, float], folder: Path) -> Measured:
    """A system with its attainment at some rates."""
    run = result([answered(i, sent_s=float(i)) for i in range(10)])
    sweep = Sweep(run.config, SearchSpace())
    for rate, attainment in rates.items():
        sweep.add(rate, f"rate-{rate:g}", run)
        sweep.points[-1] = Point(rate, rate, rate * attainment, attainment)
        sweep.rows[-1] |= {"attainment": attainment, "goodput": rate * attainment}
    folder.mkdir(parents=True)
    write_json(folder / "sweep.json", sweep.as_json())
    return Measured(SYSTEMS[index], 128, folder, sweep)


def test_the_table_compares_at_the_highest_rate_that_all_were_measured_at(tmp_path: Path) -> None:
    found = [
        measured(0, {2.0: 1.0, 4.0: 0.95, 8.0: 0.3}, tmp_path / "trace" / "a"),
        measured(1, {2.0: 0.9, 4.0: 0.5, 1.0: 1.0}, tmp_path / "trace" / "b"),
        measured(2, {2.0: 0.2, 4.0: 0.1}, tmp_path / "trace" / "c"),
    ]
    assert common_rate(found) == 4.0
    rows = outcome_rows(found)
    assert [row[2] for row in rows] == ["3.80", "1.80", "none"]
    assert [row[3] for row in rows] == ["2.00", "1.00", "none"]
    assert [row[4:6] for row in rows] == [["4", "95.0%"], ["4", "50.0%"], ["4", "10.0%"]]
    text = write_outcome(tmp_path, {"trace": found})
    assert "| 1 prefill + 1 decode | 128 | 3.80 |" in text
    assert (tmp_path / "outcome.md").read_text() == text
    assert (tmp_path / "trace" / "report.html").exists()
    assert json.loads((tmp_path / "trace" / "comparison.json").read_text())["kind"] == "sweep"


def test_systems_without_a_rate_in_common_are_not_compared_at_one(tmp_path: Path) -> None:
    found = [measured(0, {2.0: 1.0}, tmp_path / "a"), measured(1, {3.0: 1.0}, tmp_path / "b")]
    assert common_rate(found) is None
    assert outcome_rows(found)[0][4:] == ["-"] * 6
