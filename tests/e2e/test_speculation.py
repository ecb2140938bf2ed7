"""Real clusters that guess answers' next tokens: the same tokens as without, and fewer steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.rpc.pb.tandem.v1 import inference_pb2
from tests.e2e.mixed_requests import answers as mixed_answers
from tests.e2e.running import DEMO, Running, running
from tests.integration.engine.heads import write_knowing, write_knowing_eagle

COPIED = [20 + (i * 37) % 900 for i in range(60)]
PROMPTS: list[object] = ["And God said, let the waters", [*COPIED, *COPIED], "In the beginning"]
WAYS: list[dict[str, object]] = [
    {"logprobs": 1},
    {"temperature": 0.8, "seed": 5, "n": 2},
    {"frequency_penalty": 0.3, "stop": ["LORD", "king"]},
    {"structured_outputs": {"regex": "(abcdefgh [0-9],){12}"}},
]
LENGTH = 120


async def responses(cluster: Running, **fields: object) -> list[dict[str, Any]]:
    asked = [
        cluster.complete(prompt, max_tokens=LENGTH, **way, **fields)
        for prompt in PROMPTS
        for way in WAYS
        if not ("n" in way and isinstance(prompt, list))
    ]
    return await asyncio.gather(*asked)


def chosen(given: list[dict[str, Any]]) -> list[object]:
    return [
        [(choice["token_ids"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
        for answer in given
    ]


async def answers(cluster: Running, **fields: object) -> list[object]:
    return chosen(await responses(cluster, **fields))


async def figures(cluster: Running, worker: str, name: str) -> float:
    """The sum over all labels of one of a worker's metrics."""
    page = (await cluster.http.get(f"http://{cluster.cluster.metrics[worker]}/metrics")).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return sum(float(value) for key, value in lines if key.partition("{")[0] == name)


async def counted(cluster: Running) -> list[float]:
    """Tokens that the decode worker has guessed, and those of them that were right."""
    names = (f"tandem_engine_{kind}_tokens_total" for kind in ("guessed", "accepted"))
    return [await figures(cluster, "decode-0", name) for name in names]


def in_status(status: inference_pb2.ClusterStatus) -> list[float]:
    """As `counted`, of all workers and as the router knows."""
    methods = [of for worker in status.workers for of in worker.load.guesses]
    return [sum(of.num_tokens for of in methods), sum(of.num_accepted for of in methods)]


async def test_guesses_of_a_draft_and_of_the_answers_own_text_change_no_answer(tmp_path: Path) -> None:
    async with running(tmp_path, dtype="fp32", speculation="auto", draft=str(DEMO)) as cluster:
        expected = await answers(cluster, speculation="off")
        assert await counted(cluster) == [0, 0]
        given = await responses(cluster)
        assert chosen(given) == expected
        await cluster.idle()  # a worker may have guessed on when the router had found a stop string
        guessed, right = await counted(cluster)
        assert 0 < right <= guessed
        assert await figures(cluster, "decode-0", "tandem_engine_draft_seconds_total") > 0
        used = [answer["usage"].get("completion_tokens_details", {}) for answer in given]
        accepted, rejected = (
            sum(of.get(f"{kind}_prediction_tokens", 0) for of in used) for kind in ("accepted", "rejected")
        )
        assert 0 < accepted <= right
        assert accepted + rejected <= guessed
        await cluster.until(lambda status: in_status(status) == [guessed, right])
        assert await answers(cluster, speculation={"method": "ngram", "max": 2}) == expected
        assert await figures(cluster, "prefill-0", "tandem_engine_draft_seconds_total") == 0
        refused = await cluster.http.post("/v1/completions", json={"prompt": "a", "speculation": {"max": 16}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation.max")
        await cluster.idle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disaggregated", "collocated"])
async def test_guesses_change_no_answer(tmp_path: Path, mode: str) -> None:
    async with running(tmp_path / "off", mode=mode, dtype="fp32") as cluster:
        expected = await answers(cluster)
        assert await counted(cluster) == [0, 0]
    async with running(tmp_path / "auto", mode=mode, dtype="fp32", speculation="auto") as cluster:
        assert await answers(cluster) == expected
        guessed, right = await counted(cluster)
        assert 0 < right <= guessed
        await answers(cluster, speculation="off")
        assert await counted(cluster) == [guessed, right]
        assert await answers(cluster, speculation={"method": "ngram", "max": 2}) == expected
        refused = await cluster.http.post("/v1/completions", json={"prompt": "a", "speculation": {"max": 16}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation.max")
        await cluster.idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"mode": "disaggregated"},
        {"mode": "auto", "num_prefill": 1, "num_decode": 1},
        {"mode": "disaggregated", "decode_tp": 2},
        {"mode": "collocated", "kv_dtype": "int8"},
        {"mode": "collocated", "num_kv_blocks": 140},
    ],
    ids=["disaggregated", "auto", "decode-tp-2", "kv-int8", "preempted"],
)
async def test_requests_of_all_kinds_at_once_have_the_answers_that_they_have_without_guesses(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    await guesses_change_no_mixed_answer(tmp_path, DEMO, {"speculation": "auto", "draft": str(DEMO)}, shape)


async def guesses_change_no_mixed_answer(
    tmp_path: Path, model: Path, guessing: dict[str, Any], shape: dict[str, Any]
) -> None:
    """Compares two clusters' answers to all kinds of requests at once; `guessing` is what one has beside `shape`."""
    async with running(tmp_path / "off", model, served_model_name="demo", **shape) as cluster:
        expected = await mixed_answers(cluster)
    async with running(tmp_path / "on", model, served_model_name="demo", **guessing, **shape) as cluster:
        assert await mixed_answers(cluster) == expected
        workers = [name for name in cluster.cluster.metrics if name.startswith(("decode", "worker"))]
        right = [await figures(cluster, name, "tandem_engine_accepted_tokens_total") for name in workers]
        assert sum(right) > 0
        await cluster.idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3-next", {"mode": "disaggregated"}),
        ("deepseek-v3", {"mode": "auto", "num_prefill": 1, "num_decode": 1}),
    ],
)
async def test_models_with_states_and_with_latents_answer_all_kinds_with_their_heads_as_without(
    tmp_path: Path, family: str, shape: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"vocab_size": 3072, "max_position_embeddings": 2048, "tokenizer_from": DEMO}
    folder = write_knowing(tmp_path / "model", family, **sizes)
    await guesses_change_no_mixed_answer(tmp_path, folder, {"speculation": "heads"}, shape)


@pytest.mark.slow
async def test_a_draft_model_changes_no_answer_and_prefill_workers_have_none(tmp_path: Path) -> None:
    async with running(tmp_path / "off", dtype="fp32") as cluster:
        expected = await answers(cluster)
    async with running(tmp_path / "auto", dtype="fp32", speculation="auto", draft=str(DEMO)) as cluster:
        assert await answers(cluster) == expected
        assert await answers(cluster, speculation={"method": "draft", "max": 3}) == expected
        assert await figures(cluster, "decode-0", "tandem_engine_draft_seconds_total") > 0
        assert await figures(cluster, "prefill-0", "tandem_engine_draft_seconds_total") == 0
        await cluster.idle()


async def test_a_checkpoints_head_guesses_behind_a_hand_off_and_changes_no_answer(tmp_path: Path) -> None:
    folder = write_knowing(tmp_path / "model", vocab_size=3072, max_position_embeddings=2048, tokenizer_from=DEMO)
    async with running(tmp_path, model=folder, dtype="fp32", speculation="heads") as cluster:
        expected = await answers(cluster, speculation="off")
        assert await counted(cluster) == [0, 0]
        assert await answers(cluster) == expected
        guessed, right = await counted(cluster)
        assert 0 < guessed / 2 < right
        assert await answers(cluster, speculation={"method": "heads", "max": 2}) == expected
        assert await figures(cluster, "prefill-0", "tandem_engine_guessed_tokens_total") == 0


@pytest.mark.slow
async def test_a_head_from_a_folder_apart_guesses_behind_a_hand_off_and_changes_no_answer(tmp_path: Path) -> None:
    sizes = {"vocab_size": 3072, "max_position_embeddings": 2048, "num_layers": 4}
    folder = write_knowing(tmp_path / "model", tokenizer_from=DEMO, **sizes)
    head = write_knowing_eagle(tmp_path / "head", folder)
    async with running(tmp_path, model=folder, dtype="fp32", speculation="heads", draft=str(head)) as cluster:
        expected = await answers(cluster, speculation="off")
        assert await answers(cluster, speculation={"method": "heads", "max": 1}) == expected
        guessed, right = await counted(cluster)
        assert 0 < guessed / 4 < right
        assert await answers(cluster) == expected
        assert await figures(cluster, "prefill-0", "tandem_engine_guessed_tokens_total") == 0
