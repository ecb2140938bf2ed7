"""Several answers to one client request."""

from __future__ import annotations

import pytest

from services.router.dispatch.request import Request
from services.router.edge.http.endpoint import sub_requests
from services.router.edge.output_stream import OutputStream
from shared.engine.sampling_params import SamplingParams
from shared.errors import Overloaded
from shared.model.text.tokenizer import Tokenizer
from shared.seeds import derived_seed
from tests.unit.router.edge.scripted_core import ScriptedCore, Step, text_steps


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
