"""A cluster's YAML file: the command's options, and several models that meet nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.local.cluster_file import ClusterFile
from services.local.commands import TandemCommands, plan_workers
from services.local.model_pools import ModelPools, worker_prefix
from services.local.spec import ClusterSpec
from services.router.configured import discovery_of
from services.router.settings import RouterSettings
from shared.config import load_settings
from shared.cores.core_choice import CoreShare
from shared.errors import ConfigError
from shared.identity import WorkerRole

KNOWN = {"http", "num_kv_blocks", "model", "prefill", "example"}

FILE = """
http: 127.0.0.1:9000
models:
  - model: a/llama
    name: llama
    aliases: [gpt-4, fast]
    num_kv_blocks: 100
  - model: Qwen/Qwen3-0.6B
    mode: collocated
    decode: 2
    dtype: bf16
"""


def read(tmp_path: Path, text: str) -> ClusterFile:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return ClusterFile.read(path, KNOWN)


def find(model: str) -> tuple[Path, str]:
    return (Path("/cache"), model) if model.startswith("Qwen/") else (Path(model), "")


def test_options_and_models(tmp_path):
    file = read(tmp_path, FILE)
    assert file.options == {"http": "127.0.0.1:9000"}
    first, second = (entry.pools(find, is_first=not number) for number, entry in enumerate(file.models))
    assert (first.name, first.model, first.aliases, first.num_kv_blocks) == (
        "llama", Path("a/llama"), ("gpt-4", "fast"), 100,
    )  # fmt: skip
    assert [name for _, name in first.workers] == ["worker-0", "worker-1"]
    assert (second.name, second.model, second.mode, second.dtype) == (
        "Qwen/Qwen3-0.6B", Path("/cache"), "collocated", "bf16",
    )  # fmt: skip
    assert [name for _, name in second.workers] == ["qwen3-0.6b-decode-0", "qwen3-0.6b-decode-1"]


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("- a", "config", "must hold a mapping"),
        ("a: [", "config", "is not valid YAML"),
        ("htpp: x", "htpp", "did you mean http"),
        ("model: [{}]\nmodels: 3", "models", "must be a list"),
        ("models: [{name: x}]", "models.0.model", "Field required"),
        ("models: [{model: m, decodes: 2}]", "models.0.decodes", "not permitted"),
        ("models: [{model: m, decode: many}]", "models.0.decode", "valid integer"),
        ("prefill: 2\nmodels: [{model: m}]", "prefill", "belongs into an entry of models"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, field, why):
    with pytest.raises(ConfigError, match=why) as caught:
        read(tmp_path, text)
    assert caught.value.field == field


def two_models(**second: object) -> ClusterSpec:
    further = ModelPools(**{"name": "qwen", "model": Path("q"), "prefix": worker_prefix("qwen"), **second})  # type: ignore[arg-type]
    return ClusterSpec(model=Path("l"), served_model_name="llama", aliases=("gpt-4",), num_decode=2, further=(further,))


def test_each_models_workers_get_its_folder_and_the_router_gets_all(monkeypatch):
    written = {"chat_template": "{{ messages }}", "chat_template_kwargs": '{"enable_thinking": false}'}
    spec = two_models(aliases=("q",), chat_template="q.jinja").replace(**written)
    plans = plan_workers(spec, [CoreShare((), 1)] * spec.num_workers)
    assert [plan.name for plan in plans] == ["prefill-0", "decode-0", "decode-1", "qwen-prefill-0", "qwen-decode-0"]
    commands = [list(TandemCommands(spec).worker(plan, "h:1")) for plan in plans]
    assert [command[command.index("--model") + 1] for command in commands] == ["l", "l", "l", "q", "q"]
    workers: dict[WorkerRole, dict[str, str]] = {WorkerRole.PREFILL: {}, WorkerRole.DECODE: {}}
    for number, plan in enumerate(plans):
        workers[plan.role][plan.name] = f"h:{number + 1}"
    command = list(TandemCommands(spec).router(workers, "h:9"))
    first, second = load_settings(RouterSettings, command[command.index("services.router") + 1 :]).each_model()
    assert (first.model_name, first.aliases, first.prefill, first.decode) == (
        "llama", ("gpt-4",), "prefill-0=h:1", "decode-0=h:2,decode-1=h:3",
    )  # fmt: skip
    assert (second.model_name, second.aliases, second.model) == ("qwen", ("q",), Path("q"))
    assert (first.chat_template, second.chat_template) == ("{{ messages }}", "q.jinja")
    assert (first.chat_template_kwargs, second.chat_template_kwargs) == (written["chat_template_kwargs"], "")
    assert [worker.name for worker in discovery_of(second).workers] == ["qwen-prefill-0", "qwen-decode-0"]


@pytest.mark.parametrize("second", [{"name": "llama"}, {"aliases": ("gpt-4",)}, {"prefix": ""}])
def test_a_name_stands_for_one_model(second):
    with pytest.raises(ConfigError, match="stands for two models or workers") as caught:
        two_models(**second)
    assert caught.value.field == "models"


def test_each_model_has_store_nodes_of_its_own():
    """A node's blocks have one size."""
    spec = ClusterSpec(
        model=Path("l"), store_nodes=2, store_disk_folder=Path("d"), store_disk_bytes=1 << 20,
        further=(ModelPools(name="q", model=Path("q"), prefix="q-"),),
    )  # fmt: skip
    assert spec.store_names == ("store-0", "store-1", "q-store-0", "q-store-1")
    made = TandemCommands(spec)
    node = made.store_node(3, "h:9", "redis://")
    assert [node[node.index(flag) + 1] for flag in ("--name", "--disk-folder")] == ["q-store-1", "d/q-store-1"]
    stores = ",".join(f"{name}=h:{port}" for port, name in enumerate(spec.store_names, start=1))
    workers = {role: {f"{prefix}{role}-0": "h:8" for prefix in ("", "q-")} for role in WorkerRole}
    command = made.router(workers, "h:7", stores)
    settings = load_settings(RouterSettings, command[command.index("services.router") + 1 :])
    assert [each.stores for each in settings.each_model()] == ["store-0=h:1,store-1=h:2", "q-store-0=h:3,q-store-1=h:4"]
    assert ",".join(f"{name}={address}" for name, address in settings.store_addresses().items()) == stores


def test_names_in_a_routers_settings(tmp_path):
    flags = ["--model", "m", "--served-model-name", "a", "--decode", "d=h:1", "--prefill", "p=h:2"]
    models = {"b": {"model": "n", "decode": "e=h:3", "prefill": "f=h:4", "aliases": ["a"]}}
    with pytest.raises(ConfigError, match="'a' is the name of two models"):
        load_settings(RouterSettings, [*flags, "--models", json.dumps(models)]).each_model()
    models["b"] |= {"aliases": [], "stores": "s=h:6"}
    with pytest.raises(ConfigError, match="'s' has two addresses"):
        load_settings(RouterSettings, [*flags, "--models", json.dumps(models), "--stores", "s=h:5"]).store_addresses()
