"""The benchmark of exposed hand-offs takes its figures from whole, computed answers, and its clusters start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.bench import handoff
from loadtest.bench.handoff import COLLOCATED, DIRECT, STAGED, WAYS, Figures, cluster_of, main, results
from loadtest.records import Reply, TtftSplit
from loadtest.rig.command_line import call
from services.local.spec import DEMO_MODEL
from shared.errors import ConfigError, Internal
from tests.unit.loadtest.bench.test_cluster_smoke import settings_of


def reply(ttft_s: float, exposed_ms: float) -> Reply:
    split = TtftSplit(prefill_compute_ms=900 * ttft_s, ship_exposed_ms=exposed_ms)
    times = [10 + ttft_s, 10 + ttft_s + 0.03, 10 + ttft_s + 0.04]
    return Reply(sent_s=10, token_times_s=times, token_ids=[1, 2, 3], num_cached_tokens=0, split=split)


def figures(*replies: Reply) -> Figures:
    made = Figures()
    for each in replies:
        made.add(each)
    return made


def test_what_is_exposed_is_a_share_of_the_same_prompts_ttft() -> None:
    alone = figures(reply(0.1, 0), reply(0.2, 0), reply(0.3, 0))
    both = figures(reply(0.2, 10), reply(0.4, 8), reply(0.8, 4))
    assert both.exposed_percent == pytest.approx(2)
    found = {result.name: result for result in results("staged", both, alone)}
    assert found["staged, TTFT"].value == pytest.approx(400)
    assert found["staged, TTFT"].ratio == pytest.approx(0.5)
    assert found["staged, hand-off exposed"].value == 8
    assert not any("exposed" in result.name for result in results(COLLOCATED, alone, None))


def test_an_answer_from_the_cache_or_without_times_is_no_figure() -> None:
    cached, cut = reply(0.1, 1), reply(0.1, 1)
    cached.num_cached_tokens, cut.split = 16, None
    for wrong in (cached, cut):
        with pytest.raises(Internal):
            figures(wrong)


@pytest.mark.parametrize("name", [COLLOCATED, *WAYS])
def test_workers_of_each_way_accept_their_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = settings_of(cluster_of(name, "cuda:0", DEMO_MODEL, tmp_path, 0.45, 516), monkeypatch)
    assert len(workers) == (1 if name == COLLOCATED else 2)
    assert sum(worker.gpu_memory for worker in workers) == pytest.approx(0.45)
    for worker in workers:
        assert (worker.max_num_seqs, worker.max_model_len) == (8, 516)
        assert worker.sends_from_gpu == (name != STAGED.name)
        assert worker.fleet_key.get_secret_value()


def test_a_gpu_that_is_not_there_and_no_cluster_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees none: --device cpu measures there"):
        call(main, [])
    with pytest.raises(ConfigError, match="--at-once must be at least 1"):
        call(main, ["--device", "cpu", "--at-once", "0"])
    with pytest.raises(ConfigError, match="'stagged' is not one of"):
        call(main, ["--device", "cpu", "--ways", "stagged"])


@pytest.mark.slow
def test_clusters_at_once_answer_from_drawn_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    monkeypatch.setitem(handoff.ON_GPU, "3b", {**small, "head_dim": 16})
    out = tmp_path / "figures.json"
    flags = ["--shape", "3b", "--prompt-tokens", "64", "--prompts", "2", "--at-once", "2", "--scratch", str(tmp_path)]
    call(main, ["--device", "cpu", *flags, "--out", str(out)])
    found = {result["name"]: result["value"] for result in json.loads(out.read_text())["results"]}
    assert {"weights written", "collocated and in-memory, ready", "collocated, TTFT", "in-memory, TTFT"} <= set(found)
    assert found["in-memory, hand-off exposed"] >= 0
    assert (tmp_path / "3b" / "config.json").exists()
    assert "in-memory: 2 of 2 answers are those of collocated" in capsys.readouterr().out


def test_the_ways_of_a_gpu_are_by_host_memory_and_by_pointer() -> None:
    assert handoff.ways_of("cuda:0") == (STAGED, DIRECT)
