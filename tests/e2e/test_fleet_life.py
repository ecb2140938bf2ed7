"""Weights that change, leave and come while a real cluster serves: updates, sleep and wake, a peer's folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
import torch

from services.worker.weights.files import folder_files
from shared.model.checkpoints import write_random_checkpoint
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc
from tests.e2e.running import DEMO, Running, running
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 20
NUM_TOKENS = 24
WEIGHT_BYTES = 40_000_000
"""Less than the model's weights take in fp32."""
PROMPT = [20 + (i * 37) % 2000 for i in range(70)]
FIELDS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


def checkpoint(folder: Path, seed: int, **shape: int) -> Path:
    """A model of random weights with the demo model's tokenizer; 12 million numbers unless the shape says otherwise."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_layers": 4, "head_dim": 64, "num_heads": 8} | shape
    write_random_checkpoint(
        folder, vocab_size=3072, num_kv_heads=4, seed=seed, dtype=torch.bfloat16, tokenizer_from=DEMO, **sizes
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "old": checkpoint(root / "old", 1),
        "new": checkpoint(root / "new", 2),
        "other": checkpoint(root / "other", 3, intermediate_size=768),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> AsyncIterator[Running]:
    async with running(
        tmp_path_factory.mktemp("cluster"), folders["old"], num_prefill=1, num_decode=2, restart=True
    ) as started:
        yield started


async def answer(run: Running, prompt: list[int]) -> tuple[list[int], str, int]:
    """A greedy answer: its tokens, the weights that it names, how many prompt tokens were cached."""
    body = await run.complete(prompt, **FIELDS)
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["token_ids"], body["system_fingerprint"], cached


async def streamed(run: Running, prompt: list[int]) -> tuple[list[int], str]:
    """Likewise, streamed."""
    tokens: list[int] = []
    named = ""
    async for event in run.events({"prompt": prompt, "temperature": 0, "return_token_ids": True, **FIELDS}):
        assert "error" not in event, event
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
        named = event.get("system_fingerprint", named)
    return tokens, named


async def update(run: Running, folder: Path, **fields: float) -> Any:
    return await run.http.post("/v1/update_weights", json={"model_path": str(folder), **fields})


async def test_an_update_under_20_streams_loses_none_and_every_answer_says_whose_it_is(cluster, folders):
    prompts = [[*PROMPT, 100 + number] for number in range(NUM_STREAMS)]
    expected: dict[str, list[list[int]]] = {}
    before = [await answer(cluster, prompt) for prompt in prompts]
    (old,) = {named for _, named, _ in before}
    expected[old] = [tokens for tokens, *_ in before]
    assert (await answer(cluster, prompts[0]))[2] > 0
    updated = asyncio.Event()
    seen: list[tuple[int, list[int], str]] = []

    async def keep_asking(number: int) -> None:
        """One answer after another, until one has begun behind the update."""
        while True:
            is_last = updated.is_set()
            seen.append((number, *await streamed(cluster, prompts[number])))
            if is_last:
                return

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(keep_asking(number))
        await until(lambda: len(seen) >= NUM_STREAMS)
        response = await update(cluster, folders["new"])
        updated.set()
    assert response.status_code == 200, response.text
    new = response.json()["system_fingerprint"]
    assert new != old
    assert sorted(response.json()["workers"]) == ["decode-0", "decode-1", "prefill-0"]
    assert {named for *_, named in seen} == {old, new}
    after = [await answer(cluster, prompt) for prompt in prompts]
    assert {named for _, named, _ in after} == {new}
    expected[new] = [tokens for tokens, *_ in after]
    assert expected[new] != expected[old]
    for number, tokens, named in seen:
        assert tokens == expected[named][number]
    await cluster.idle()


async def test_prefixes_of_other_weights_are_not_found(cluster, folders):
    prompt = [7, *PROMPT]
    assert (await update(cluster, folders["old"])).status_code == 200
    first, old, _ = await answer(cluster, prompt)
    assert (await answer(cluster, prompt))[2] > 0
    assert (await update(cluster, folders["new"])).status_code == 200
    second, new, cached = await answer(cluster, prompt)
    assert cached == 0
    assert (second == first) == (new == old) is False
    assert (await update(cluster, folders["old"])).status_code == 200
    assert (await answer(cluster, prompt))[:2] == (first, old)


async def test_a_worker_that_dies_after_an_update_comes_back_with_its_weights(cluster, folders):
    """Its settings name the old folder."""
    response = await update(cluster, folders["new"])
    new = response.json()["model_fingerprint"]
    before = await answer(cluster, PROMPT)
    cluster.signal("decode-0")
    assert await cluster.restarted("decode-0")
    await cluster.until(
        lambda status: any(
            w.worker.name == "decode-0" and w.connected and w.load.model_fingerprint == new and not w.load.draining
            for w in status.workers
        )
    )
    assert (await cluster.http.post("/sleep", json={"workers": ["decode-1"]})).status_code == 200
    assert (await answer(cluster, PROMPT))[:2] == before[:2]  # of the one that came back
    assert (await cluster.http.post("/wake_up")).json() == {"workers": ["decode-1"]}
    assert (await update(cluster, folders["old"])).status_code == 200


async def test_a_folder_of_other_shapes_is_refused_by_the_tensors_name_and_the_weights_stay(cluster, folders):
    before = await answer(cluster, PROMPT)
    response = await update(cluster, folders["other"])
    assert response.status_code == 400, response.text
    assert "model.layers.0.mlp" in response.json()["error"]["message"]
    response = await update(cluster, folders["old"].parent / "none")
    assert response.status_code == 400, response.text
    response = await update(cluster, Path("relative"))
    assert response.status_code == 400, response.text
    assert (await answer(cluster, PROMPT))[:2] == before[:2]
    await cluster.idle()


async def test_an_answer_that_outlasts_the_time_keeps_the_old_weights(cluster, folders):
    _, before, _ = await answer(cluster, PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    events = cluster.events(body)
    first = await anext(events)
    response = await update(cluster, folders["new"], timeout_s=0.001)
    assert response.status_code == 504, response.text
    rest = [first, *[event async for event in events]]
    assert sum(len(choice.get("token_ids") or []) for event in rest for choice in event["choices"]) == 200
    assert rest[-1]["system_fingerprint"] == before
    assert (await answer(cluster, PROMPT))[1] == before


async def test_a_worker_that_sleeps_frees_its_memory_and_answers_as_before_once_it_wakes(cluster):
    before = await answer(cluster, PROMPT)
    process = psutil.Process(cluster.pid("decode-1"))
    awake = process.memory_info().rss
    response = await cluster.http.post("/sleep?level=1", json={"workers": ["decode-1"]})
    assert response.json() == {"workers": ["decode-1"]}, response.text
    assert (await cluster.http.get("/is_sleeping")).json() == {"is_sleeping": True, "workers": ["decode-1"]}
    assert process.memory_info().rss < awake - WEIGHT_BYTES
    assert (await answer(cluster, PROMPT))[:2] == before[:2]  # of the other one
    response = await cluster.http.post("/sleep")
    assert sorted(response.json()["workers"]) == ["decode-0", "decode-1", "prefill-0"], response.text
    waiting = asyncio.create_task(answer(cluster, PROMPT))
    await cluster.until(lambda status: status.queue_len == 1)
    assert "asleep" in (await cluster.status()).not_ready_reason
    response = await cluster.http.post("/wake_up")
    assert sorted(response.json()["workers"]) == ["decode-0", "decode-1", "prefill-0"], response.text
    async with asyncio.timeout(DEADLINE_S):
        assert (await waiting)[:2] == before[:2]
    assert (await cluster.http.get("/is_sleeping")).json() == {"is_sleeping": False, "workers": []}
    await cluster.idle()


async def test_the_same_over_grpc(cluster):
    stub = fleet_pb2_grpc.FleetServiceStub(cluster.channel)
    slept = await stub.Sleep(fleet_pb2.SleepRequest(workers=["decode-0"]), timeout=DEADLINE_S)
    assert [worker.load.asleep for worker in slept.workers] == [True]
    woken = await stub.WakeUp(fleet_pb2.WakeUpRequest(workers=["decode-0"]), timeout=DEADLINE_S)
    assert [worker.load.asleep for worker in woken.workers] == [False]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Sleep(fleet_pb2.SleepRequest(workers=["nobody"]), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_worker_starts_with_a_peers_folder(cluster, folders, tmp_path):
    address = next(w.address for w in (await cluster.status()).workers if w.worker.name == "decode-0")
    folder = tmp_path / "fetched"
    environment = {**os.environ, **cluster.cluster.children["decode-0"].environment}  # the fleet's key
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.decode", "--name", "late", "--model", str(folder), "--weights-from", address,
        "--dtype", "fp32", "--num-kv-blocks", "64", stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told = []
        async with asyncio.timeout(DEADLINE_S):
            while (event := json.loads(await process.stdout.readline()))["event"] == "progress":
                told.append(event["text"])
        assert event["event"] == "ready", event
        assert told.index("fetching weights") < told.index("loading weights")
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGTERM)
        await process.wait()
    for path in folder_files(folders["old"]):
        assert (folder / path.name).read_bytes() == path.read_bytes()
