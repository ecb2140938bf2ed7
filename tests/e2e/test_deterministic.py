"""A cluster in deterministic mode, in bf16: no batch, hand-off, cache or dead worker changes a bit of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from services.local.commands import WorkerPlan
from tests.e2e.running import PatientCommands, Running, running
from tests.unit.kernels.isas import ISAS, needs_library
from tests.waiting import until

pytestmark = [pytest.mark.slow, needs_library]

NUM_STREAMS = 12
FIELDS = {"max_tokens": 200, "ignore_eos": True, "logprobs": 2, "return_token_ids": True}
MODE = {"dtype": "bf16", "deterministic": True, "num_kv_blocks": 400}
KILL_AT = 20
"""Tokens that every stream has when a decode worker dies."""


def request(number: int) -> dict[str, object]:
    prompt = [20 + (i * (37 + 2 * number)) % 2000 for i in range(30 + 19 * number)]
    sampling = {"temperature": 0.8, "seed": number} if number % 3 == 2 else {"temperature": 0}
    return {"prompt": prompt, **FIELDS, **sampling}


@dataclass
class Answer:
    """What one stream brought: token ids, and their log-probabilities as they were written."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


async def stream(cluster: Running, number: int, answer: Answer) -> Answer:
    async for event in cluster.events(request(number)):
        assert "error" not in event, event["error"]
        for choice in event["choices"]:
            answer.token_ids += choice.get("token_ids") or []
            answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
    return answer


async def together(cluster: Running) -> list[Answer]:
    return list(await asyncio.gather(*(stream(cluster, n, Answer()) for n in range(NUM_STREAMS))))


async def test_answers_are_the_same_alone_together_and_after_a_death(tmp_path: Path) -> None:
    async with running(tmp_path, num_decode=2, **MODE) as cluster:
        alone = [await stream(cluster, number, Answer()) for number in range(NUM_STREAMS)]
        assert all(len(answer.token_ids) == len(answer.logprobs) == 200 for answer in alone)
        assert await together(cluster) == alone

        answers = [Answer() for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(stream(cluster, n, answer)) for n, answer in enumerate(answers)]
        await until(lambda: min(len(answer.token_ids) for answer in answers) >= KILL_AT)
        cluster.signal(await cluster.busy())
        await asyncio.gather(*tasks)
        assert answers == alone


class Unequal(PatientCommands):
    """Gives each named worker an instruction set."""

    sets: ClassVar[dict[str, str]] = {}

    def worker(self, plan: WorkerPlan, kvstore: str) -> Sequence[str]:
        return [*super().worker(plan, kvstore), "--cpu-isa", self.sets[plan.name]]


@pytest.mark.skipif(not {"avx2", "avx512"} <= set(ISAS), reason="this processor has one of the two at most")
async def test_workers_with_avx2_and_avx512_serve_together(tmp_path: Path) -> None:
    unequal = await answer_with(tmp_path / "unequal", {"decode-0": "avx2", "prefill-0": "avx512"})
    assert unequal == await answer_with(tmp_path / "equal", {"decode-0": "avx512", "prefill-0": "avx512"})


async def answer_with(state_dir: Path, sets: dict[str, str]) -> Answer:
    """Of workers that compute with these instruction sets."""
    kind = type("Unequal", (Unequal,), {"sets": sets})
    async with running(state_dir, kind=kind, **MODE) as run:
        found = await stream(run, 5, Answer())
        assert not (await run.status()).degraded
        return found
