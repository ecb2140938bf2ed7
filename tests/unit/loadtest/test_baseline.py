"""The comparison of systems: its systems and workloads, what it keeps, what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtest.baseline import cli
from loadtest.baseline.calibration import Capacity, Sample, best_of, busy_rate, capacity_from, targets_from
from loadtest.baseline.cells import cells_of
from loadtest.baseline.cli import baseline
from loadtest.baseline.design import Design, in_order
from loadtest.baseline.options import SystemOptions
from loadtest.baseline.outcome import results, write_outcome
from loadtest.baseline.study import run_study
from loadtest.baseline.systems import (
    Candidate,
    Hardware,
    adaptive,
    collocated,
    default_splits,
    disaggregated,
    make_cluster,
    speculating,
)
from loadtest.baseline.windows import Calibrated, Study, Window, WindowFile
from loadtest.baseline.workloads import OF_GUESSES, WORKLOADS, WindowSize, parse_workloads, window_plan, write_trace
from loadtest.rate_search import Point
from loadtest.records import FailureCause
from loadtest.rig.command_line import call
from loadtest.rig.models import SERVED, write_model
from loadtest.slo import Slo
from loadtest.summary import summarize
from loadtest.sweep import point_of
from loadtest.workloads.spec import TraceOptions, parse_workload
from loadtest.workloads.synthetic import FIRST_ANSWERED
from loadtest.workloads.trace_json import read_json_trace
from services.local.commands import WorkerPlan
from shared.cores.core_choice import CoreShare
from shared.errors import ConfigError, DeadlineExceeded, WorkerLost
from shared.identity import WorkerRole
from shared.model.families.registry import load_config
from tests.demo import DEMO
from tests.unit.loadtest.factories import SLO, answered, broken, result

TINY = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


def design(**changes: object) -> Design:
    made = Design(
        workloads={"balanced": WORKLOADS["balanced"]},
        loads=[0.6],
        collocated=collocated(2),
        splits=[disaggregated(1, 2)],
        adaptive=adaptive(2),
        chunks=["128"],
        rounds=8,
        size=WindowSize(4, 0.1),
        slo=None,
        seed=1,
        vocab_size=1000,
        commit="abc",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_model_is_written_once_and_can_be_served(tmp_path: Path) -> None:
    write_model(tmp_path / "m", TINY, DEMO)
    config = load_config(tmp_path / "m")
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.head_dim) == (32, 2, 2, 8)
    assert (tmp_path / "m" / "tokenizer.json").exists()
    before = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    write_model(tmp_path / "m", TINY, DEMO)
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == before


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        write_model(tmp_path / "m", SERVED["s"], tmp_path)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_every_system_has_the_same_workers_and_memory(num_workers: int, tmp_path: Path) -> None:
    systems = [collocated(num_workers), adaptive(num_workers)]
    systems += [disaggregated(split, num_workers) for split in default_splits(num_workers)]
    hardware = Hardware(DEMO, "cpu", 256)
    specs = [make_cluster(Candidate(system), hardware, tmp_path).spec for system in systems]
    assert {(spec.num_workers, spec.num_kv_blocks) for spec in specs} == {(num_workers, 256)}
    assert len({system.name for system in systems}) == len(systems)
    assert all(" " not in system.name for system in systems)


def test_only_a_system_that_knows_the_targets_tells_its_router(tmp_path: Path) -> None:
    hardware = Hardware(DEMO, "cpu", 256)
    workers = {WorkerRole.PREFILL: {"prefill-0": "127.0.0.1:2"}, WorkerRole.DECODE: {"worker-0": "127.0.0.1:3"}}
    told = make_cluster(Candidate(adaptive(2), slo=Slo(0.25, 0.03)), hardware, tmp_path)
    command = told._commands.router(workers, "127.0.0.1:1")
    assert {"--targets.ttft-s=0.25", "--targets.tpot-s=0.03"} < set(command)
    fixed = make_cluster(Candidate(disaggregated(1, 2), 128), hardware, tmp_path)
    assert not any("target" in part for part in fixed._commands.router(workers, "127.0.0.1:1"))
    bounded = make_cluster(Candidate(disaggregated(1, 2), 128, refused_by_s=0.25), hardware, tmp_path)
    assert "--admission.ttft-target-s=0.25" in bounded._commands.router(workers, "127.0.0.1:1")


def test_workers_that_guess_differ_from_those_without_in_that_alone(tmp_path: Path) -> None:
    hardware, slo = Hardware(DEMO, "cpu", 256), Slo(0.25, 0.03)
    plan = WorkerPlan(WorkerRole.DECODE, "decode-0", CoreShare((), 1))
    systems = (collocated(1), speculating(1, "auto"))
    made = [make_cluster(Candidate(system, slo=slo), hardware, tmp_path) for system in systems]
    off, guessing = [list(cluster._commands.worker(plan, "127.0.0.1:1")) for cluster in made]
    assert guessing == [*off, "--speculation", "auto"]
    assert list(design(collocated=collocated(1), splits=[], adaptive=speculating(1, "auto")).turns) == [
        "1-collocated",
        "speculation-auto",
        "1-collocated-again",
    ]


@pytest.mark.parametrize(
    "flags", [["--prefill", "1"], ["--auto"], ["--no-auto"], ["--chunks", "128"], ["--model", str(DEMO)]]
)
def test_an_option_that_workers_that_guess_do_not_have_is_refused_by_name(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out" / "figures.json"
    name = flags[0].removeprefix("--no-").removeprefix("--")
    with pytest.raises(ConfigError, match=f"{name} and speculation exclude each other: ") as refused:
        call(baseline, ["--speculation", "auto", *flags, "--out", str(out)])
    assert refused.value.field == name
    assert not out.parent.exists()


def test_chunks_and_modes_that_are_not_named_are_the_default_ones() -> None:
    assert (SystemOptions().budgets(), SystemOptions().adaptive()) == (["128", "512", "time"], adaptive(2))
    assert SystemOptions(auto=False).adaptive() is None
    assert SystemOptions(speculation="auto").budgets() == ["time"]


@pytest.mark.parametrize(("name", "share", "run_len"), [("edit", 1.0, 36), ("chat", 0.16, 3)])
def test_prompts_have_their_share_of_the_answer_in_runs(name: str, share: float, run_len: int) -> None:
    plan = window_plan(OF_GUESSES[name], SLO, 20.0, WindowSize(200, 2.0), 7, 1000)
    assert plan.schedule is not None
    turns = [due.conversation.turns[0] for due in plan.schedule.entries]
    prompts = [plan.tokens.prompt(turn.spans) for turn in turns]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)  # none is found in a cache
    shared = []
    for turn, prompt in zip(turns, prompts, strict=True):
        assert len(prompt) == turn.num_new_tokens
        assert prompt[-1] == FIRST_ANSWERED - 1
        answer = range(FIRST_ANSWERED, FIRST_ANSWERED + turn.num_output_tokens)
        copied = [token for token in prompt if token in answer]
        assert copied == sorted(set(copied))
        runs = "".join("x" if token in answer else " " for token in prompt).split()
        assert max(map(len, runs), default=0) <= run_len
        shared.append(len(copied) / len(answer))
    assert sum(shared) / len(shared) == pytest.approx(share, abs=0.03)


def test_the_second_turn_of_a_system_is_at_the_other_end_of_its_round_and_rounds_turn_around() -> None:
    turns = list(design().turns)
    assert turns == ["2-collocated", "auto", "1P+1D", "2-collocated-again"]
    assert in_order(turns, 0) == turns
    assert in_order(turns, 1) == turns[::-1]
    assert "auto" not in design(adaptive=None).turns


def test_workloads_are_named_or_given() -> None:
    assert list(parse_workloads("balanced decode-heavy")) == ["balanced", "decode-heavy"]
    assert parse_workloads("mine=fixed:input=8,output=2") == {"mine": "fixed:input=8,output=2"}
    for wrong in ("", "unknown", "a b=", "x/y=fixed", "a=fixed a=uniform"):
        with pytest.raises(ConfigError, match="workloads"):
            parse_workloads(wrong)
    for share in ("much", "1.5"):
        with pytest.raises(ConfigError, match="share"):
            parse_workload(f"copies:share={share}")


@pytest.mark.parametrize(("rate", "requests"), [(2.0, 20), (50.0, 100), (9.99, 20)])
def test_a_window_has_its_requests_or_as_many_as_come_in_its_time(rate: float, requests: int) -> None:
    plan = window_plan("fixed:input=8,output=2", SLO, rate, WindowSize(20, 2.0), 7, 1000)
    assert plan.schedule is not None
    assert plan.schedule.num_requests == requests
    assert plan.schedule.offered_rate == pytest.approx(rate)


def test_the_simulator_reads_a_windows_requests(tmp_path: Path) -> None:
    plan = window_plan("random:input=500-1500,output=4-12", SLO, 10.0, WindowSize(20, 2.0), 7, 1000)
    assert plan.schedule is not None
    write_trace(tmp_path / "t.jsonl", plan.schedule)
    found = list(read_json_trace(tmp_path / "t.jsonl"))
    turns = [due.conversation.turns[0] for due in plan.schedule.entries]
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in found] == [
        (turn.num_new_tokens, turn.num_output_tokens) for turn in turns
    ]
    first_s = plan.schedule.entries[0].at_s
    assert [r.at_s for r in found] == pytest.approx([due.at_s - first_s for due in plan.schedule.entries], abs=1e-5)
    hashes = [hash_id for r in found for hash_id in r.hash_ids]
    assert len(hashes) == len(set(hashes))
    chat = window_plan("conversation:turns=2", SLO, 1.0, WindowSize(4, 2.0), 7, 1000)
    assert chat.schedule is not None
    with pytest.raises(ConfigError, match="several turns"):
        write_trace(tmp_path / "c.jsonl", chat.schedule)


def test_targets_are_three_times_what_one_request_alone_takes() -> None:
    alone = [answered(i, sent_s=0.0, times_s=[0.1 + i / 100, 0.2 + i / 100]) for i in range(8)]
    assert (targets_from(alone).ttft_s, targets_from(alone).tpot_s) == (0.51, 0.3)
    assert busy_rate([*alone, broken()], 4.0) == 2.0
    for lost in (lambda: targets_from([broken()]), lambda: busy_rate([broken()], 1.0)):
        with pytest.raises(WorkerLost, match="no request of the calibration"):
            lost()


def test_the_capacity_is_the_highest_rate_of_which_nine_in_ten_are_in_time() -> None:
    def served(rate: float, num_good: int) -> Point:
        records = [answered(i) for i in range(num_good)] + [broken()] * (10 - num_good)
        return point_of(rate, summarize(result(records)))

    assert served(4.0, 9).attainment == 0.9
    assert capacity_from([served(4.0, 10), served(8.0, 6), served(5.7, 9)]) == Capacity(5.7)
    # No rate was low enough.
    assert capacity_from([served(0.8, 8), served(0.4, 7)]) == Capacity(served(0.8, 8).goodput) == Capacity(0.8)
    assert capacity_from([served(8.0, 0), served(4.0, 0)]) == Capacity(4.0)


def test_a_request_that_was_interrupted_was_not_offered_at_a_rate() -> None:
    records = [answered(0), broken(1), broken(2, FailureCause.INTERRUPTED)]
    point = point_of(4.0, summarize(result(records)))
    assert (point.attainment, point.offered_rate) == (0.5, 0.2)


def test_a_capacity_is_at_least_the_rate_where_a_late_generator_hid_more() -> None:
    def at(rate: float, attainment: float, *, valid: bool) -> Point:
        return Point(rate, rate, rate * attainment, attainment, valid)

    late, kept_up = at(4.0, 1.0, valid=False), at(4.0, 1.0, valid=True)
    missed, hidden = at(8.0, 0.5, valid=True), at(8.0, 0.5, valid=False)
    assert capacity_from([late]) == Capacity(4.0, is_floor=True)
    assert capacity_from([late, missed]) == Capacity(4.0, is_floor=True)
    assert capacity_from([kept_up, hidden]) == Capacity(4.0, is_floor=True)
    assert capacity_from([kept_up, missed]) == Capacity(4.0)
    assert capacity_from([at(2.0, 0.5, valid=False), kept_up, missed]) == Capacity(4.0, is_floor=True)
    # A late window above a rate that was missed in time says nothing.
    assert capacity_from([kept_up, missed, at(16.0, 0.1, valid=False)]) == Capacity(4.0)


def test_a_capacity_that_is_a_floor_is_marked_for_readers_and_scripts(tmp_path: Path) -> None:
    for is_floor, shown in ((False, "capacity 20 req/s"), (True, "capacity at least 20 req/s")):
        study = measured(GOOD)
        study.workloads["balanced"] = replace(CALIBRATED, capacity=Capacity(20.0, is_floor))
        [cell] = cells_of(design(), study, wanted=1, within=0.05)
        text = write_outcome(tmp_path / "f.json", design(), [cell], "here", "")
        assert shown in text
        assert shown in (tmp_path / "f.html").read_text()
        capacity = json.loads((tmp_path / "f.json").read_text())["results"][0]
        assert (capacity["name"], capacity["value"]) == ("balanced: capacity", 20.0)
        assert capacity.get("at_least", False) == is_floor


def test_the_best_chunk_budget_has_the_most_good_requests_then_the_most_room() -> None:
    quick, slow = answered(times_s=(0.05, 0.06)), answered(times_s=(0.15, 0.16))
    assert best_of({"128": [quick, broken()], "512": [slow, slow]}, SLO) == "512"
    assert best_of({"128": [slow, slow], "512": [quick, quick]}, SLO) == "512"
    assert best_of({"128": [quick, quick], "512": [quick, slow]}, SLO) == "128"


def test_a_sample_stands_for_all_lengths_of_a_workload() -> None:
    workload = parse_workload("random:input=64-256@0.7+1024-1984@0.3,output=16", TraceOptions())
    lengths = [c.turns[0].num_new_tokens for c in Sample(workload).conversations(np.random.default_rng(3))]
    assert len(lengths) == 8
    assert lengths == sorted(lengths)
    assert sum(length >= 1024 for length in lengths) in (2, 3)


def test_every_offered_request_counts_and_one_without_an_answer_is_a_miss() -> None:
    records = [
        answered(0, times_s=(0.1, 0.12)),
        answered(1, times_s=(0.3, 0.31)),  # late
        broken(2),
        broken(3, FailureCause.TIMEOUT),
    ]
    window = Window.of(result(records), SLO, workload="w", load=0.6, round=0, turn="auto", chunk="time")
    assert window.good == "1000"
    assert window.outcomes == [True, False, False, False]
    assert (window.ttft_ms, window.tpot_ms, window.itl_ms) == ([100.0, 300.0], [20.0, 10.0], [20.0, 10.0])


def windows(study_design: Design, good: dict[str, str], rounds: int = 8) -> list[Window]:
    """The same outcome for a system in each round."""
    return [
        Window("balanced", 0.6, number, turn, "128", good[turn], 2.0, [50.0, 90.0], [5.0, 6.0], [4.0, 8.0], "abc")
        for number in range(rounds)
        for turn in study_design.turns
    ]


CALIBRATED = Calibrated("balanced", WORKLOADS["balanced"], SLO, Capacity(20.0), {"2-collocated": "128", "1P+1D": "512"})
GOOD = {"2-collocated": "1111110000", "auto": "1111111100", "1P+1D": "1111000000", "2-collocated-again": "1111110000"}


def measured(good: dict[str, str], rounds: int = 8) -> Study:
    return Study({}, {"balanced": CALIBRATED}, windows(design(), good, rounds))


def test_figures_for_scripts_have_the_ratio_to_the_best_fixed_system(tmp_path: Path) -> None:
    study = measured({turn: good * 4 for turn, good in GOOD.items()})
    [cell] = cells_of(design(), study, wanted=300, within=0.05)
    text = write_outcome(tmp_path / "f.json", design(), [cell], "here", "")
    found = {row["name"]: row for row in json.loads((tmp_path / "f.json").read_text())["results"]}
    goodput = found["balanced 0.6 auto: goodput"]
    assert (goodput["value"], goodput["unit"], goodput["limit"]) == (16.0, "req/s", 20.0)
    assert (goodput["fraction"], goodput["peer"]) == (0.8, "2-collocated")
    assert goodput["ratio"] == pytest.approx(4 / 3)
    assert goodput["low"] < goodput["ratio"] < goodput["high"]
    assert "ratio" not in found["balanced 0.6 1P+1D: goodput"]
    assert found["balanced 0.6 2-collocated-again: goodput"]["ratio"] == 1.0
    assert found["balanced 0.6 1P+1D: ITL p99"]["value"] == 8.0
    assert found["balanced 0.6 auto: requests"]["value"] == 320
    assert "| 0.6 | auto / 1P+1D | 128 / 0 | 2.000 |" in text
    assert text.count("| better |") == 2
    assert "2 of 2 comparisons are resolved." in text
    page = (tmp_path / "f.html").read_text()
    assert page.count("<circle") == 3


def test_what_is_not_resolved_is_said() -> None:
    [cell] = cells_of(design(), measured(GOOD), wanted=300, within=0.05)
    assert [made.verdict.text for made in cell.comparisons if made.verdict is not None] == [
        "not resolved: 80 requests, 300 wanted"
    ] * 2
    [single] = cells_of(design(), measured(GOOD, rounds=1), wanted=1, within=0.05)
    assert single.comparisons[0].interval is None
    assert [row.ratio for row in results(design(), [single])] == [None] * len(results(design(), [single]))


def test_only_rounds_in_which_all_had_their_turn_are_compared() -> None:
    study = measured(GOOD)
    del study.windows[-1]
    [cell] = cells_of(design(), study, wanted=1, within=0.05)
    assert {len(turn.windows) for turn in cell.turns.values()} == {7}
    assert study.next_round("balanced", 0.6, list(design().turns)) == 7
    assert study.has("balanced", 0.6, 7, "1P+1D")
    assert not study.has("balanced", 0.6, 7, "2-collocated-again")
    del study.windows[0]
    assert cells_of(design(), study, wanted=1, within=0.05) == []


def test_without_the_adaptive_system_the_fixed_ones_are_compared() -> None:
    fixed = design(adaptive=None)
    [cell] = cells_of(fixed, measured({turn: good * 4 for turn, good in GOOD.items()}), wanted=300, within=0.05)
    assert [(made.of.name, made.to.name) for made in cell.comparisons] == [
        ("1P+1D", "2-collocated"),
        ("2-collocated-again", "2-collocated"),
    ]
    assert cell.comparisons[0].verdict is not None
    assert cell.comparisons[0].verdict.text == "worse"


def test_a_study_goes_on_where_its_file_ends(tmp_path: Path) -> None:
    file = WindowFile(tmp_path / "f.windows.jsonl")
    settings = {"model": "demo", "slo": None, "seed": 4}
    file.begin(settings)
    at_least = replace(CALIBRATED, name="prefill-heavy", capacity=Capacity(3.5, is_floor=True))
    for workload in (CALIBRATED, at_least):
        file.add_workload(workload)
    kept = windows(design(), GOOD, rounds=2)
    for window in kept:
        file.add_window(window)
    whole = file.path.read_text()
    file.path.write_text(whole[:-20])  # cut off within the last line
    study = WindowFile(file.path).resume({"model": "demo", "slo": None})
    assert (study.settings, study.workloads) == (settings, {"balanced": CALIBRATED, "prefill-heavy": at_least})
    assert study.windows == kept[:-1]
    file.add_window(kept[-1])
    assert file.path.read_text() == whole


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no JSON\n",
        '{"window":{}}\n',
        '{"settings":{}}\n{"window":{"round":1}}\n',
        '{"settings":{}}\n{"workload":{"name":"balanced"}}\n',
    ],
)
def test_what_is_no_study_is_refused(content: str, tmp_path: Path) -> None:
    file = WindowFile(tmp_path / "f.windows.jsonl")
    file.path.write_text(content)
    with pytest.raises(ConfigError, match="continue"):
        file.resume({})


def test_a_study_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    file = WindowFile(tmp_path / "f.windows.jsonl")
    file.begin({"model": "demo", "seed": 4})
    with pytest.raises(ConfigError, match="has model demo, not other"):
        file.resume({"model": "other"})
    with pytest.raises(ConfigError, match="has seed 4, not 5"):
        file.resume({"model": "demo", "seed": 5})


class LostFleet:
    """A cluster that does not come back."""

    async def __aenter__(self) -> LostFleet:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    @asynccontextmanager
    async def awake(self, candidate: Candidate) -> AsyncIterator[str]:
        raise DeadlineExceeded("router serves no prompts after 60 s")
        yield


async def test_what_is_measured_is_kept_whatever_ends_the_study(tmp_path: Path) -> None:
    async def run(study: Study) -> str:
        file = WindowFile(tmp_path / "f.windows.jsonl")
        return await run_study(design(), study, file, LostFleet(), 3600.0, asyncio.Event())  # type: ignore[arg-type]

    assert await run(measured(GOOD, rounds=1)) == "router serves no prompts after 60 s"
    with pytest.raises(DeadlineExceeded):
        await run(measured(GOOD, rounds=0))


@pytest.mark.parametrize(("stopped", "status"), [("", 0), ("the target was gone", 1)])
def test_each_study_has_files_of_its_own_and_a_partial_one_says_so(
    stopped: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*given: object) -> str:
        return stopped

    monkeypatch.setattr(cli, "run_study", run)
    for name in ("v0.1", "v0.2", "page.html", "figures.json"):
        assert call(baseline, ["--model", str(DEMO), "--out", str(tmp_path / name)]) == status
        assert json.loads((tmp_path / name).read_text())["results"] == []
    own = [f"{name}{end}" for name in ("v0.1", "v0.2", "page.html") for end in ("", ".md", ".html", ".windows.jsonl")]
    beside = [f"figures{end}" for end in (".json", ".md", ".html", ".windows.jsonl")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(own + beside)
