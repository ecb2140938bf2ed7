"""A group that is stopped and started again is placed by what it measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.worker import host
from services.worker.host import EngineHost
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.engine.messages import AddSequence, EngineDied, Event, SequenceFailed, StepOutput
from shared.engine.sampling_params import SamplingParams
from shared.engine.sequence import EngineSequence, Goal
from shared.model.ranks.rank_decoder import RankDecoder
from tests.integration.engine.families import write_family
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.unit.collectives.in_threads import needs_library
from tests.waiting import DEADLINE_S

pytestmark = needs_library

PROMPT = [7 + (i * 37) % 190 for i in range(53)]


def settings(model: Path, *flags: str) -> WorkerSettings:
    always = ("--name", "d0", "--bind", "127.0.0.1:0", "--model", str(model), "--dtype", "fp32", "--num-threads", "2")
    split = ("--tp", "2", "--ep", "2", "--num-kv-blocks", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    return load_settings(WorkerSettings, [*always, *split, *flags])


async def generate(chosen: WorkerSettings) -> tuple[list[int], RankDecoder]:
    """32 tokens of a worker that is started for them and ends, and its decoder."""
    engine_host = EngineHost(chosen)
    events: asyncio.Queue[Event] = asyncio.Queue()
    found: list[int] = []
    try:
        engine_host.listen(events.put_nowait)
        await engine_host.start(lambda *_: None)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=32)
        sequence = EngineSequence(
            "s", list(PROMPT), len(PROMPT), params, b"root-of-a-model!", Goal.COMPLETION, len(PROMPT) + 32, frozenset()
        )
        engine_host.engine.submit(AddSequence(sequence))
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < 32:
                event = await events.get()
                assert not isinstance(event, (EngineDied, SequenceFailed)), event
                if isinstance(event, StepOutput):
                    found += [token.token.token_id for token in event.tokens]
    finally:
        await engine_host.close()
        await engine_host.close()  # twice is fine: counted once
    decoder = engine_host.model.decoder
    assert isinstance(decoder, RankDecoder)
    return found, decoder


@pytest.mark.slow
async def test_a_restarted_group_lays_its_experts_by_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The leader is this process, which other tests need as it was.
    monkeypatch.setattr(host, "take_share", lambda *_: None)
    model, kept = write_family(tmp_path / "model", "mixtral"), tmp_path / "load of d0.json"
    chosen = settings(model, "--expert-load", str(tmp_path / "load of {name}.json"), "--expert-spare", "1")
    expected = transformers_greedy(model, PROMPT, 32)
    found, first = await generate(chosen)
    assert found == expected
    measured = json.loads(kept.read_text())
    assert (measured["num_layers"], measured["num_experts"]) == (2, 5)
    # Two choices a token and layer. The last layer's block is computed for the rows that give a token alone.
    assert [sum(measured["tokens"][layer]) for layer in ("0", "1")] == [2 * (len(PROMPT) + 31), 2 * 32]

    measured["tokens"]["0"] = [9000, 10, 10, 10, 10]
    kept.write_text(json.dumps(measured))
    found, again = await generate(chosen)
    assert found == expected, "the follower holds what the leader thinks it does"
    assert again.expert_bytes > first.expert_bytes, "copies are counted among the weights"
    faded = json.loads(kept.read_text())["tokens"]["0"]
    assert sum(faded) == 4520 + 2 * (len(PROMPT) + 31)
