"""Adapters by the request on a real cluster: every answer is the one of the model that its adapter is merged into."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.families.registry import load_config
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2
from tests.e2e.running import DEMO, PatientCommands, Running, running
from tests.unit.collectives.in_threads import needs_library
from tests.unit.model.adapters.merged import merged
from tests.unit.model.paged_run import load_oracle, oracle_greedy
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [20 + (i * 37) % 2000 for i in range(70)]
NUM_TOKENS = 32
FIELDS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
TWO_POOLS: dict[str, Any] = {"num_prefill": 2, "num_decode": 2, "restart": True}


class Holding(PatientCommands):
    """Armed workers stand still with work: prefill workers before their next step, decode workers within answers."""

    def worker(self, plan, kvstore):
        spared = "@8" if plan.name.startswith("decode") else ""
        return [*super().worker(plan, kvstore), "--failpoints", f"engine.step=hang{spared}"]


class Adapters:
    """Folders, and what they answer PROMPT with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base: PreTrainedModel = load_oracle(DEMO)
        self.expected = {"": self._answer(self.base)}

    def write(self, name: str, seed: int, *, folder: str = "", rank: int = 8) -> Path:
        """Writes one into the folder of that name; `expected[name]` is what it answers."""
        path = write_random_adapter(
            self.folder / (folder or name), load_config(DEMO), rank=rank, seed=seed, strength=1.5
        )
        self.expected[name] = self._answer(merged(self.base, path))
        return path

    @staticmethod
    def _answer(model: PreTrainedModel) -> list[int]:
        return oracle_greedy(model, PROMPT, NUM_TOKENS)[0]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    made = Adapters(tmp_path_factory.mktemp("adapters"))
    for seed, name in enumerate(("a", "b", "c", "d"), 1):
        made.write(name, seed, rank=4 * seed)
    assert len({tuple(tokens) for tokens in made.expected.values()}) == 5
    return made


def given(adapters: Adapters, names: Sequence[str] = ("a", "b"), **more: Any) -> dict[str, Any]:
    named = " ".join(f"{name}={adapters.folder / name}" for name in names)
    return {"adapters": named, "adapter_folders": str(adapters.folder)} | more


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, adapters: Adapters) -> AsyncIterator[Running]:
    """Two pools of two workers that have fewer slots than there are adapters."""
    shape = {**TWO_POOLS, **given(adapters, adapter_slots=2)}
    async with running(tmp_path_factory.mktemp("cluster"), kind=Holding, **shape) as started:
        yield started


async def load(cluster: Running, name: str, folder: Path) -> None:
    response = await cluster.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
    assert response.status_code == 200, response.text


async def ask(cluster: Running, model: str) -> list[int]:
    return await cluster.tokens(PROMPT, **FIELDS, **({"model": model} if model else {}))


async def test_names_are_listed_with_their_parent_and_answer_as_their_merged_models(
    cluster: Running, adapters: Adapters
) -> None:
    listed = (await cluster.http.get("/v1/models")).json()["data"]
    base = listed[0]["id"]
    assert {entry["id"]: entry.get("parent") for entry in listed} == {base: None, "a": base, "b": base}
    twin = await cluster.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=DEADLINE_S)
    assert {model.id: model.parent for model in twin.models} == {base: "", "a": base, "b": base}
    for worker in (await cluster.status()).workers:
        assert (worker.num_adapters, worker.num_ready_adapters) == (2, 2)
        assert not worker.load.HasField("adapters"), "no key sees the names of other tenants there"
    models = ["", "a", "b", f"{base}:a", base, "b", "a", ""]
    found = await asyncio.gather(*(ask(cluster, model) for model in models))
    assert list(found) == [adapters.expected[model.removeprefix(base).removeprefix(":")] for model in models]
    answer = await cluster.complete(PROMPT, model="a", max_tokens=2)
    assert answer["model"] == "a"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64, "its own prefix, by now"
    response = await cluster.http.post("/v1/completions", json={"prompt": PROMPT, "model": f"{base}:x"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_chat_names_the_adapter_that_answered(cluster: Running) -> None:
    body = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    response = await cluster.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["model"]) == (200, "b")


async def test_more_adapters_than_slots_take_turns(cluster: Running, adapters: Adapters) -> None:
    for name in ("c", "d"):
        await load(cluster, name, adapters.folder / name)
    names = ["a", "b", "c", "d", ""] * 3
    found = await asyncio.gather(*(ask(cluster, name) for name in names))
    assert list(found) == [adapters.expected[name] for name in names]
    await cluster.idle()


async def test_a_reload_under_a_name_is_the_new_one_at_once_and_running_answers_keep_the_old(
    cluster: Running, adapters: Adapters
) -> None:
    adapters.write("old", 11, folder="turn-1")
    adapters.write("new", 12, folder="turn-2")
    await load(cluster, "turns", adapters.folder / "turn-1")
    stream = cluster.streamed(PROMPT, model="turns", **FIELDS)
    begun = await anext(stream)
    running_ones = [asyncio.create_task(ask(cluster, "turns")) for _ in range(4)]
    await load(cluster, "turns", adapters.folder / "turn-2")
    after = await asyncio.gather(*(ask(cluster, "turns") for _ in range(4)))
    assert list(after) == [adapters.expected["new"]] * 4
    assert begun + [token async for tokens in stream for token in tokens] == adapters.expected["old"]
    for tokens in await asyncio.gather(*running_ones):
        assert tokens in (adapters.expected["old"], adapters.expected["new"])
    fleet = fleet_pb2_grpc.FleetServiceStub(cluster.channel)
    gone = await fleet.UnloadAdapter(fleet_pb2.UnloadAdapterRequest(name="turns"), timeout=DEADLINE_S)
    assert sorted(gone.workers) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    response = await cluster.http.post("/v1/completions", json={"prompt": PROMPT, "model": "turns"})
    assert response.status_code == 404
    response = await cluster.http.post("/v1/unload_lora_adapter", json={"lora_name": "turns"})
    assert response.status_code == 404


async def test_what_is_not_allowed_or_does_not_fit_is_refused_and_changes_nothing(
    cluster: Running, adapters: Adapters, tmp_path: Path
) -> None:
    write_random_adapter(tmp_path / "outside", load_config(DEMO))
    write_random_adapter(adapters.folder / "dora", load_config(DEMO), use_dora=True)
    for folder, message in (
        (tmp_path / "outside", "adapter_folders"),
        (adapters.folder / ".." / "outside", "adapter_folders"),
        (adapters.folder / "nowhere", "adapter_config.json is missing"),
        (adapters.folder / "dora", "DoRA"),
    ):
        body = {"lora_name": "a", "lora_path": str(folder)}
        response = await cluster.http.post("/v1/load_lora_adapter", json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "lora_path"
    for path in ("load", "unload"):
        body = {"lora_name": "a b", "lora_path": str(adapters.folder / "a")}
        response = await cluster.http.post(f"/v1/{path}_lora_adapter", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")
    fleet = fleet_pb2_grpc.FleetServiceStub(cluster.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.LoadAdapter(
            fleet_pb2.LoadAdapterRequest(name="a", folder=str(adapters.folder / "dora")), timeout=DEADLINE_S
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await ask(cluster, "a") == adapters.expected["a"]


def other_weights(adapters: Adapters, folder: Path) -> Path:
    """The demo model with adapter `d` in its weights."""
    shutil.copytree(DEMO, folder)
    tensors = load_file(DEMO / "model.safetensors")
    changed = merged(adapters.base, adapters.folder / "d").state_dict()
    save_file(
        {name: changed[name].to(old.dtype).contiguous() for name, old in tensors.items()}, folder / "model.safetensors"
    )
    return folder


async def test_adapters_are_read_again_where_weights_leave_and_add_to_those_that_come(
    cluster: Running, adapters: Adapters, tmp_path: Path
) -> None:
    async def answers() -> list[list[int]]:
        return list(await asyncio.gather(*(ask(cluster, model) for model in ("", "a", "b"))))

    expected = [adapters.expected[name] for name in ("", "a", "b")]
    assert await answers() == expected
    assert (await cluster.http.post("/sleep", timeout=DEADLINE_S)).status_code == 200
    body = {"lora_name": "c", "lora_path": str(adapters.folder / "c")}
    refused = await cluster.http.post("/v1/load_lora_adapter", json=body, timeout=DEADLINE_S)
    assert (refused.status_code, "no weights" in refused.text) == (503, True), refused.text
    assert (await cluster.http.post("/wake_up", timeout=DEADLINE_S)).status_code == 200
    assert await answers() == expected
    await load(cluster, "c", adapters.folder / "c")
    assert await ask(cluster, "c") == adapters.expected["c"]
    other = other_weights(adapters, tmp_path / "other")
    response = await cluster.http.post("/v1/update_weights", json={"model_path": str(other)}, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    base = load_oracle(other)
    found = [Adapters._answer(base), *(Adapters._answer(merged(base, adapters.folder / name)) for name in ("a", "b"))]
    assert await answers() == found != expected
    response = await cluster.http.post("/v1/update_weights", json={"model_path": str(DEMO)}, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    assert await answers() == expected


@pytest.mark.parametrize("kind", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
async def test_a_worker_that_is_killed_costs_no_token_and_comes_back_with_what_was_loaded(
    cluster: Running, adapters: Adapters, kind: str
) -> None:
    path = adapters.write(f"late-{kind}", 21, folder=f"late-{kind}")
    await load(cluster, f"late-{kind}", path)
    await cluster.idle()
    busy, other = f"{kind}-0", f"{kind}-1"
    fleet = fleet_pb2_grpc.FleetServiceStub(cluster.channel)
    await fleet.Drain(fleet_pb2.DrainWorkersRequest(workers=[other]), timeout=DEADLINE_S)
    await cluster.arm(busy)
    names = [f"late-{kind}", "a", "", "b"] * 2
    tasks = [asyncio.create_task(ask(cluster, name)) for name in names]
    assert await cluster.busy(kind) == busy
    await fleet.Undrain(fleet_pb2.DrainWorkersRequest(workers=[other]), timeout=DEADLINE_S)
    cluster.signal(busy)
    found = await asyncio.gather(*tasks)
    assert list(found) == [adapters.expected[name] for name in names]
    await cluster.restarted(busy)
    await cluster.healthy()
    await fleet.Drain(fleet_pb2.DrainWorkersRequest(workers=[other]), timeout=DEADLINE_S)

    async def answered() -> bool:
        return await ask(cluster, f"late-{kind}") == adapters.expected[f"late-{kind}"]

    await until(answered)
    await fleet.Undrain(fleet_pb2.DrainWorkersRequest(workers=[other]), timeout=DEADLINE_S)
    await cluster.idle()


async def answer_alike(run: Running, adapters: Adapters) -> None:
    names = ["a", "", "b", "c"] * 2
    found = await asyncio.gather(*(ask(run, name) for name in names))
    assert list(found) == [adapters.expected[name] for name in names]


@pytest.mark.slow
async def test_workers_of_both_roles_answer_alike(tmp_path: Path, adapters: Adapters) -> None:
    shape = {"mode": "auto", "num_prefill": 1, "num_decode": 1}
    async with running(tmp_path, **given(adapters, ("a", "b", "c"), **shape)) as run:
        await answer_alike(run, adapters)


async def test_collocated_workers_answer_alike_and_load_nothing_without_allowed_folders(
    tmp_path: Path, adapters: Adapters
) -> None:
    shape = {"mode": "collocated", "num_prefill": 0, "adapter_folders": ""}
    async with running(tmp_path, **given(adapters, ("a", "b", "c"), **shape)) as run:
        body = {"lora_name": "d", "lora_path": str(adapters.folder / "d")}
        response = await run.http.post("/v1/load_lora_adapter", json=body)
        assert (response.status_code, "adapter_folders is empty" in response.text) == (400, True)
        await answer_alike(run, adapters)


@needs_library
async def test_workers_that_are_groups_answer_alike_and_read_what_is_loaded_on_every_rank(
    tmp_path: Path, adapters: Adapters
) -> None:
    shape = {"decode_tp": 2, "adapter_slots": 2}
    async with running(tmp_path, **given(adapters, **shape)) as run:
        await load(run, "c", adapters.folder / "c")
        await answer_alike(run, adapters)
        assert await ask(run, "c") == adapters.expected["c"]
        await run.idle()
