"""Several answers to one client request."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.router.edge.fan_out import derived_seed, interleave, sub_requests
from services.router.edge.generation import Generation
from services.router.request import Request
from shared.engine.sampling_params import SamplingParams
from shared.errors import Overloaded
from shared.model.tokenizer import Tokenizer
from tests.unit.router.edge.scripted_core import ScriptedRequest, Step, text_steps


def prepared(seed: int = 7, request_id: str = "r") -> Request:
    return Request(request_id, (1,), SamplingParams(seed=seed))


def running(tokenizer: Tokenizer, steps: list[Step]) -> tuple[Generation, ScriptedRequest]:
    request = prepared()
    scripted = ScriptedRequest(request, steps)
    return Generation(request, scripted, tokenizer.stream()), scripted


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


async def test_each_choice_keeps_its_order(tokenizer: Tokenizer) -> None:
    pairs = [running(tokenizer, text_steps(tokenizer, text)) for text in ("abc", "defgh", "i")]
    texts = ["", "", ""]
    async with contextlib.aclosing(interleave([generation for generation, _ in pairs])) as deltas:
        async for index, delta in deltas:
            texts[index] += delta.text
    assert texts == ["abc", "defgh", "i"]


async def test_one_failure_ends_all(tokenizer: Tokenizer) -> None:
    endless, endless_running = running(tokenizer, [asyncio.Event()])
    failing, _ = running(tokenizer, [Overloaded("full")])
    with pytest.raises(Overloaded):
        async with contextlib.aclosing(interleave([endless, failing])) as deltas:
            await anext(deltas)
    assert endless_running.closed.is_set()


async def test_closing_early_frees_every_choice_that_is_being_read(tokenizer: Tokenizer) -> None:
    pairs = [running(tokenizer, [*text_steps(tokenizer, "ab")[:1], asyncio.Event()]) for _ in range(3)]
    async with contextlib.aclosing(interleave([generation for generation, _ in pairs])) as deltas:
        await anext(deltas)
    assert all(scripted.closed.is_set() for _, scripted in pairs)
