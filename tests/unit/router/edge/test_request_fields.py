"""What a model recommends, when a request is due, and how several answers differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.router.dispatch.request import Request
from services.router.edge.http.endpoint import sub_requests
from services.router.edge.output_stream import OutputStream
from services.router.edge.scheduling import SchedulingHints, scheduling_hints
from services.router.edge.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, ModelLoadError, Overloaded
from shared.model.text.tokenizer import Tokenizer
from shared.seeds import derived_seed
from tests.unit.router.edge.scripted_core import ScriptedCore, Step, text_steps


def test_only_sampling_is_taken_from_the_file(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == NO_DEFAULTS
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "eos_token_id": 1, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert GenerationDefaults.load(tmp_path).given == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(("name", "value"), [("temperature", "hot"), ("top_k", 1.5), ("top_p", 2), ("min_p", True)])
def test_a_wrong_value_stops_the_start_with_its_name(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelLoadError) as caught:
        GenerationDefaults.load(tmp_path)
    assert caught.value.field == name


def test_all_of_them_and_none():
    assert scheduling_hints({}) == SchedulingHints("default", 0, "", 0.0)
    headers = {"x-tenant": "gold", "x-priority": "-3", "x-session-id": "s1", "x-ttft-timeout-ms": "1500"}
    headers |= {"x-cache-retention": "1h", "x-next-turn-ms": "2500"}
    assert scheduling_hints(headers) == SchedulingHints("gold", -3, "s1", 1.5, 3600.0, 2.5)
    assert scheduling_hints({"x-next-turn-ms": "0"}).next_turn_s == 0.0


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-tenant", "a b"),
        ("x-session-id", "s" * 129),
        ("x-priority", "high"),
        ("x-priority", "101"),
        ("x-ttft-timeout-ms", "0"),
        ("x-ttft-timeout-ms", "nan"),
        ("x-ttft-timeout-ms", "soon"),
        ("x-cache-retention", "2h"),
        ("x-next-turn-ms", "-1"),
        ("x-next-turn-ms", "nan"),
        ("x-next-turn-ms", "soon"),
        ("x-next-turn-ms", "86400001"),
    ],
)
def test_a_bad_one_is_named(header, value):
    with pytest.raises(InvalidRequest) as refused:
        scheduling_hints({header: value})
    assert refused.value.field == header


def prepared(seed: int = 7, request_id: str = "r") -> Request:
    return Request(request_id, (1,), SamplingParams(seed=seed))


def stream(tokenizer: Tokenizer, *answers: list[Step]) -> tuple[OutputStream, ScriptedCore]:
    """One choice for each script."""
    scripts = iter(answers)
    core = ScriptedCore(lambda request: next(scripts))
    return OutputStream(core, [prepared(request_id=f"r-{i}") for i in range(len(answers))], tokenizer), core


def test_one_answer_is_the_request_itself() -> None:
    request = prepared()
    assert sub_requests([request], 1) == [request]


def test_answers_have_their_own_ids_and_seeds_the_first_the_clients_seed() -> None:
    fanned = sub_requests([prepared(7), prepared(8)], 3)
    assert [request.request_id for request in fanned] == [f"r-{i}" for i in range(6)]
    seeds = [request.sampling.seed for request in fanned]
    assert (seeds[0], seeds[3]) == (7, 8)
    assert len(set(seeds)) == 6


def test_derived_seeds_are_fixed_forever() -> None:
    # A client that repeats its seed and n must get the same answers from every release.
    assert [derived_seed(7, i) for i in range(3)] == [7, 14818979533484651488, 4504606891059362275]
    assert all(0 <= derived_seed(2**64 - 1, i) < 2**64 for i in range(50))


async def test_what_came_before_a_failure_is_still_passed_on(tokenizer: Tokenizer) -> None:
    outputs, core = stream(tokenizer, text_steps(tokenizer, "ab")[:1], [Overloaded("full")])
    async with outputs:
        index, delta = await anext(outputs)
        assert (index, delta.text) == (0, "a")
        with pytest.raises(Overloaded):
            await anext(outputs)
        assert all(running.closed.is_set() for running in core.running)
