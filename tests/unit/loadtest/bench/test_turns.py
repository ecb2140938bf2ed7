"""Engines measured in turns: order, warm-up, ratios of the same round, and engines that drop out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.peers import quant
from loadtest.bench.peers.measure import Turns, results_of
from loadtest.bench.peers.turns import CannotRun, Case, EngineProcess, Measured, named, take_turns
from loadtest.bench.peers.venvs import preloading
from shared.errors import ConfigError


class Scripted(EngineProcess):
    """Answers from a list instead of a process."""

    def __init__(self, name: str, answers: list[float | CannotRun], order: list[str]) -> None:
        self.name = name
        self._answers = answers
        self._order = order

    async def ask(self, **task: Any) -> float:
        self._order.append(self.name)
        answer = self._answers.pop(0)
        if isinstance(answer, CannotRun):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("loadtest.bench.peers.turns.PAUSE_S", 0.0)


PREFILL = Case("prefill 100", 1, 100)


async def test_the_order_turns_each_round_and_the_first_round_only_warms_up():
    order: list[str] = []
    a, b = Scripted("a", [9.0, 1.0, 2.0], order), Scripted("b", [9.0, 2.0, 2.0], order)
    (measured,), failures = await take_turns([a, b], [PREFILL], num_rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert measured.rates == {"a": [100.0, 50.0], "b": [50.0, 50.0]}
    assert failures == {}


async def test_an_engine_that_fails_keeps_only_the_cases_it_finished():
    order: list[str] = []
    a = Scripted("a", [1.0] * 4, order)
    b = Scripted("b", [1.0, 1.0, 1.0, CannotRun("too large")], order)
    second = Case("decode 4", 4, 16, 8)
    results, failures = await take_turns([a, b], [PREFILL, second], num_rounds=1)
    assert [sorted(measured.rates) for measured in results] == [["a", "b"], ["a"]]
    assert failures == {"b": "decode 4: too large"}


def test_vllm_gets_its_openmp_behind_what_is_hidden_and_the_others_nothing(tmp_path):
    interpreter, openmp = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.write_bytes(b"")
    hidden = {"LD_PRELOAD": "/hide.so", "TANDEM_HIDE_ISA": "avx2"}
    found = preloading("vllm_cpu", interpreter, hidden)
    assert found["LD_PRELOAD"].split(":")[:2] == ["/hide.so", str(openmp)]
    assert found["TANDEM_HIDE_ISA"] == "avx2"
    assert preloading("transformers_sdpa", interpreter, hidden) == hidden
    openmp.unlink()
    assert str(openmp) not in preloading("vllm_cpu", interpreter, None).get("LD_PRELOAD", "")


@pytest.mark.slow
async def test_a_process_that_cannot_load_says_why(tmp_path):
    process = EngineProcess("ours", Path(sys.executable), tmp_path / "nothing", tmp_path / "scratch", 1)
    async with process:
        with pytest.raises(CannotRun, match=r"ModelLoadError: .* does not exist"):
            await process.start()


def test_ratios_are_those_of_the_form_that_is_judged():
    measured = Measured(Case("decode 1, int8", 1, 256, 12), {"ours int8": [30.0, 40.0], "ours": [20.0, 20.0]})
    rows = {row.peer: row.ratio for row in results_of(measured, named("ours", "int8"))}
    assert rows == {"ours int8": None, "ours": 1.75}


@pytest.mark.parametrize(
    ("options", "field"), [({"forms": "int3"}, "forms"), ({"model": "70b"}, "model"), ({"peers": "vllm_cpu"}, "peers")]
)
def test_unknown_forms_shapes_and_peers_are_refused_before_anything_is_installed(options, field):
    with pytest.raises(ConfigError) as refused:
        quant.main(Turns(), **options)
    assert refused.value.details["field"] == field
