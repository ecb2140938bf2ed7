"""The comparison of systems: on scripted servers, whose answers are known, and on real clusters in small."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.baseline.cells import cells_of
from loadtest.baseline.cli import baseline
from loadtest.baseline.design import Design
from loadtest.baseline.study import Conductor, run_study
from loadtest.baseline.systems import Candidate, adaptive, collocated, disaggregated
from loadtest.baseline.windows import Study, WindowFile
from loadtest.baseline.workloads import WindowSize
from loadtest.rig.command_line import call
from loadtest.slo import Slo
from tests.demo import DEMO
from tests.integration.loadtest.conftest import FakeServer, StartFake
from tests.integration.loadtest.fake_script import Behaviour

QUICK = Behaviour(messages=((0, 1), (0, 1), (0, 1)))
REFUSED = Behaviour(refuse=429)
DESIGN = Design(
    workloads={"mine": "random:input=8-64,output=2-3"},
    loads=[0.5, 2.0],
    collocated=collocated(2),
    splits=[disaggregated(1, 2)],
    adaptive=adaptive(2),
    chunks=["128"],
    rounds=2,
    size=WindowSize(6, 0.0),
    slo=Slo(60.0, 30.0),
    seed=3,
    vocab_size=1000,
    commit="abc",
    busy_s=0.1,
)
HOUR_S = 3600.0


class ScriptedFleet:
    """Servers in the clusters' places, and in which order they were measured."""

    def __init__(self, servers: Mapping[str, FakeServer]) -> None:
        self._servers = servers
        self.order: list[str] = []

    @asynccontextmanager
    async def awake(self, candidate: Candidate) -> AsyncIterator[str]:
        self.order.append(candidate.name)
        yield self._servers[candidate.system.name].http

    async def __aenter__(self) -> ScriptedFleet:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    async def keep(self, candidates: set[Candidate]) -> None:
        pass


def scripted(start_fake: StartFake) -> dict[str, FakeServer]:
    """One refuses every second request."""
    return {
        "2-collocated": start_fake(QUICK),
        "1P+1D": start_fake(QUICK, REFUSED),
        "auto": start_fake(QUICK),
    }


def conductor(design: Design, study: Study, file: WindowFile, fleet: ScriptedFleet) -> Conductor:
    return Conductor(design, study, file, fleet, asyncio.Event())  # type: ignore[arg-type]


async def test_all_systems_get_the_same_requests_in_turns(start_fake: StartFake, tmp_path: Path) -> None:
    servers = scripted(start_fake)
    fleet, file = ScriptedFleet(servers), WindowFile(tmp_path / "w.jsonl")
    study = file.begin({})
    await conductor(DESIGN, study, file, fleet).run(HOUR_S)
    names = ("2-collocated-chunk-128", "auto-ttft-60000-tpot-30000", "1P+1D-chunk-128", "2-collocated-chunk-128")
    there = [f"{name}-within-60000" for name in names]
    # Always busy, then half that rate and all of it, at which all are in time here.
    calibration = ["2-collocated-chunk-128", there[0], there[0]]
    assert fleet.order == [*calibration, *there, *there, *there[::-1], *there[::-1]]
    # 2 rounds of 6 requests at 2 loads; the collocated system has two turns and is calibrated with.
    sent = {
        name: [row for row in server.finish().values() if not row.request_id.startswith("warmup")]
        for name, server in servers.items()
    }
    assert (len(sent["auto"]), len(sent["1P+1D"])) == (24, 24)
    lengths = {name: [(len(row.prompt), row.max_tokens) for row in rows] for name, rows in sent.items()}
    assert sorted(lengths["auto"]) == sorted(lengths["1P+1D"])
    assert sorted(lengths["2-collocated"][-48:]) == sorted(2 * lengths["auto"])
    prompts = [tuple(row.prompt) for rows in sent.values() for row in rows]
    assert len(prompts) == len(set(prompts))  # of no two, so no cache favours who comes later
    first, second = cells_of(DESIGN, study, wanted=12, within=1.0)
    assert (first.load, second.load) == (0.5, 2.0)
    for cell in (first, second):
        assert {turn.name: turn.num_good for turn in cell.turns.values()} == {
            "2-collocated": 12,
            "auto": 12,
            "1P+1D": 6,
            "2-collocated-again": 12,
        }
        assert cell.turns["1P+1D"].attainment == 0.5
        against = {made.to.name: made for made in cell.comparisons}
        assert against["1P+1D"].alone == (6, 0)


async def test_a_kept_study_measures_what_is_missing(start_fake: StartFake, tmp_path: Path) -> None:
    file = WindowFile(tmp_path / "w.jsonl")
    short = replace(DESIGN, loads=[2.0], rounds=1)
    begun = ScriptedFleet(scripted(start_fake))
    await conductor(short, file.begin({}), file, begun).run(HOUR_S)
    lines = file.path.read_text().splitlines(keepends=True)
    file.path.write_text("".join(lines[:-2]))  # as if it had been cut off in its first round
    study = file.resume({})
    kept = list(study.windows)
    fleet = ScriptedFleet(scripted(start_fake))
    await conductor(replace(short, rounds=2), study, file, fleet).run(HOUR_S)
    names = ("2-collocated-chunk-128", "auto-ttft-60000-tpot-30000", "1P+1D-chunk-128", "2-collocated-chunk-128")
    there = [f"{name}-within-60000" for name in names]
    assert fleet.order == [*there[2:], *there[::-1]]
    assert study.windows[: len(kept)] == kept
    assert file.resume({}).windows == study.windows
    [cell] = cells_of(DESIGN, study, wanted=12, within=1.0)
    assert {turn.num_requests for turn in cell.turns.values()} == {12}


async def test_without_time_nothing_is_measured_but_targets_and_capacity(start_fake: StartFake, tmp_path: Path) -> None:
    file = WindowFile(tmp_path / "w.jsonl")
    study = file.begin({})
    fleet = ScriptedFleet(scripted(start_fake))
    await conductor(replace(DESIGN, slo=None), study, file, fleet).run(0.0)
    assert fleet.order[:2] == ["2-collocated-chunk-128"] * 2
    assert {name.partition("-within")[0] for name in fleet.order[2:]} == {"2-collocated-chunk-128"}
    assert study.windows == []
    found = file.resume({}).workloads["mine"]
    assert found.slo.ttft_s is not None
    assert found.capacity.rate > 0


async def test_the_chunk_budget_with_the_most_good_requests_is_taken(start_fake: StartFake, tmp_path: Path) -> None:
    good, bad = start_fake(QUICK), start_fake(QUICK, REFUSED)

    class ByChunk(ScriptedFleet):
        @asynccontextmanager
        async def awake(self, candidate: Candidate) -> AsyncIterator[str]:
            takes_512 = candidate.system.mode == "collocated"
            yield (good if (candidate.chunk_len == 512) == takes_512 else bad).http

    file = WindowFile(tmp_path / "w.jsonl")
    study = file.begin({})
    await conductor(replace(DESIGN, chunks=["128", "512"]), study, file, ByChunk({})).run(0.0)
    assert study.workloads["mine"].chunks == {"2-collocated": "512", "1P+1D": "128"}


async def test_a_system_that_is_gone_has_missed_and_ends_the_study(start_fake: StartFake, tmp_path: Path) -> None:
    servers = {**scripted(start_fake), "auto": start_fake(Behaviour(messages=((0, 1),), die_after=0))}
    file = WindowFile(tmp_path / "w.jsonl")
    study, fleet = file.begin({}), ScriptedFleet(servers)
    design = replace(DESIGN, workloads={"mine": "fixed:input=8,output=1"}, loads=[1.0], rounds=3)
    why = await run_study(design, study, file, fleet, HOUR_S, asyncio.Event())  # type: ignore[arg-type]
    assert "does not serve" in why
    assert [(window.round, window.turn) for window in study.windows] == [
        *((0, turn) for turn in design.turns),
        (1, "2-collocated-again"),
        (1, "1P+1D"),
    ]
    assert [window.good for window in study.windows if window.turn == "auto"] == ["000000"]


@pytest.mark.slow
def test_real_clusters_are_measured_and_a_kept_study_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    small = ["--workloads", "mine=fixed:input=40,output=4", "--loads", "0.5", "--chunks", "256"]
    window = ["--requests", "3", "--window", "0s", "--slo", "ttft=60s,tpot=30s", "--budget", "30m"]
    arguments = [*small, *window, "--model", str(DEMO), "--num-kv-blocks", "512", "--out", str(out)]
    assert call(baseline, [*arguments, "--rounds", "1"]) == 0
    assert call(baseline, [*arguments, "--rounds", "2", "--continue"]) == 0
    figures = json.loads(out.read_text())
    assert {"machine", "commit", "results"} <= figures.keys()
    found = {row["name"]: row for row in figures["results"]}
    for turn in ("auto", "1P+1D", "2-collocated", "2-collocated-again"):
        assert found[f"mine 0.5 {turn}: requests"]["value"] == 6
        assert found[f"mine 0.5 {turn}: goodput"]["fraction"] == 1.0
    assert {"ratio", "low", "high", "peer"} <= found["mine 0.5 auto: goodput"].keys()
    assert "0 of 2 comparisons are resolved" in out.with_suffix(".md").read_text()
    assert "<svg" in out.with_suffix(".html").read_text()
