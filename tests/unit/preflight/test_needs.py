"""What a component needs: its model, memory, ports and disk."""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.preflight.component import Component
from services.preflight.finding import Level
from services.preflight.limits import check_disk, check_ports, check_shm
from services.preflight.machine import Machine
from services.preflight.model_folder import EngineNeed, check_tokenizer, check_weights
from services.preflight.needs import Overrides, needs_of
from shared.errors import ConfigError, InvalidRequest
from shared.model.adapters.target_modules import values_of_rank
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.model.layers.head import HeadParameters
from tests.integration.engine.families import write_family
from tests.integration.engine.heads import write_eagle
from tests.unit.preflight.trees import add

DEMO = Path("models/demo")


def test_a_worker_is_judged_by_its_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_WORKER_DEVICE", "cuda:1")
    needs = needs_of(Component.WORKER, Overrides(), ["--model", "models/demo", "--bind", "0.0.0.0:50060"], DEMO)
    assert needs.engine is not None
    assert (needs.engine.model, needs.engine.device) == (DEMO, "cuda:1")
    assert needs.ports["bind"] == "0.0.0.0:50060"
    assert needs.transfers
    assert needs.redis is None  # workers do not talk to it


def test_options_stand_above_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_WORKER_MODEL", "/nowhere")
    overrides = Overrides(model=DEMO, device="cpu", redis_url="redis://there")
    needs = needs_of(Component.WORKER, overrides, ["--name", "decode-0"], DEMO)
    assert needs.engine is not None
    assert (needs.engine.model, needs.engine.device) == (DEMO, "cpu")
    assert needs.redis is not None
    assert needs.redis.url == "redis://there"


def test_a_store_without_tiers_moves_no_blocks() -> None:
    index_alone = needs_of(Component.KVSTORE, Overrides(), ["--redis-url", "redis://there:1"], DEMO)
    assert index_alone.redis is not None
    assert (index_alone.redis.url, index_alone.transfers, index_alone.disk) == ("redis://there:1", False, None)
    node = needs_of(Component.KVSTORE, Overrides(), ["--disk-bytes", "10", "--disk-folder", "/data"], DEMO)
    assert (node.transfers, node.disk) == (True, (Path("/data"), 10))


def test_a_router_needs_a_tokenizer_and_no_engine() -> None:
    needs = needs_of(Component.ROUTER, Overrides(model=DEMO), [], DEMO)
    assert (needs.tokenizer, needs.engine, needs.transfers) == (DEMO, None, False)
    assert set(needs.ports) == {"http", "grpc"}


def test_no_secret_is_shown() -> None:
    flags = ["--redis-url", "redis://:secret@there", "--fleet-key", "secret-secret-secret"]
    assert "secret" not in repr(needs_of(Component.KVSTORE, Overrides(), flags, DEMO))


def test_what_the_component_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="model"):
        needs_of(Component.WORKER, Overrides(), [], DEMO)
    with pytest.raises(ConfigError, match="gpu_memory"):
        needs_of(Component.WORKER, Overrides(model=DEMO), ["--gpu-memory", "2"], DEMO)
    with pytest.raises(InvalidRequest, match="--component"):
        needs_of(Component.ALL, Overrides(), ["--model", "x"], DEMO)


def test_shared_memory_is_measured(tmp_path: Path) -> None:
    assert "free" in check_shm(Machine()).text
    missing = check_shm(Machine(tmp_path))
    assert missing.level is Level.FAIL
    assert "emptyDir" in missing.fix


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        bind = f"127.0.0.1:{listener.getsockname()[1]}"
        finding = check_ports({"http": bind, "grpc": "127.0.0.1:0"})
    assert finding.level is Level.FAIL
    assert f"http {bind}: Address already in use" in finding.text
    assert "grpc" not in finding.text
    assert check_ports({"http": bind}).level is Level.OK


def test_an_address_that_is_not_this_machines_is_a_failure() -> None:
    assert check_ports({"http": "192.0.2.1:8000"}).level is Level.FAIL
    assert check_ports({"http": "nonsense"}).level is Level.FAIL


def test_a_disk_tier_may_not_be_larger_than_its_volume(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "tier", 1 << 20).level is Level.OK
    assert check_disk(tmp_path / "tier", 1 << 60).level is Level.FAIL
    (tmp_path / "file").write_text("")
    assert check_disk(tmp_path / "file", 1).level is Level.FAIL


def test_the_cgroup_bounds_the_memory(tmp_path: Path) -> None:
    add(tmp_path, "/sys/fs/cgroup/memory.max", "1000000")
    add(tmp_path, "/sys/fs/cgroup/memory.current", "400000")
    assert Machine(tmp_path).free_memory_bytes() == 600_000
    add(tmp_path, "/sys/fs/cgroup/memory.max", "max")
    assert Machine(tmp_path).free_memory_bytes() > 1_000_000


TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, fp32


@pytest.fixture
def need(tmp_path: Path) -> EngineNeed:
    write_random_checkpoint(tmp_path / "model", max_position_embeddings=512)
    return EngineNeed(tmp_path / "model", "cpu", 0.9, "fp32", "auto", "auto", 0, 0, 16)


def test_a_whole_model_that_fits_is_described(need: EngineNeed) -> None:
    finding = check_weights(need, 1 << 30)
    assert finding.level is Level.OK
    assert "LlamaForCausalLM" in finding.text
    assert f"KV {TOKEN_BYTES} B a token" in finding.text


def test_memory_for_the_weights_alone_is_not_enough(need: EngineNeed) -> None:
    finding = check_weights(need, 1000)
    assert finding.level is Level.FAIL
    assert "do not fit" in finding.text


def test_a_host_of_a_group_needs_room_for_its_part_alone(need: EngineNeed) -> None:
    weights = (need.model / "model.safetensors").stat().st_size
    need = replace(need, max_model_len=32)
    memory = weights // 2 + 32 * TOKEN_BYTES
    assert memory < weights
    assert check_weights(need, memory).level is Level.FAIL
    finding = check_weights(replace(need, num_hosts=2), memory)
    assert finding.level is Level.OK
    assert "for one of 2 hosts' parts" in finding.text


def test_a_head_takes_memory_of_its_own(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, max_position_embeddings=512, extra_config={"num_nextn_predict_layers": 1})
    flags = ["--model", str(tmp_path), "--dtype", "fp32", "--name", "w"]
    plain, heads = (needs_of(Component.WORKER, Overrides(), [*flags, "--speculation", name], DEMO).engine
                    for name in ("auto", "heads"))  # fmt: skip
    assert plain is not None
    assert heads is not None
    assert f"KV {TOKEN_BYTES} B a token" in check_weights(plain, 1 << 30).text
    assert f"KV {TOKEN_BYTES * 3 // 2} B a token" in check_weights(heads, 1 << 30).text
    config = load_config(tmp_path)
    views = HeadParameters.allocate(config, torch.float32, "meta").checkpoint_views(config)
    weights = sum(math.prod(view.shape) * 4 for view in views.values())
    of_both = (tmp_path / "model.safetensors").stat().st_size
    room = of_both + 16 * TOKEN_BYTES * 3 // 2
    assert check_weights(heads, room).level is not Level.FAIL
    assert check_weights(heads, room - weights).level is Level.FAIL
    assert check_weights(plain, room - weights).level is not Level.FAIL


def test_a_head_in_a_folder_apart_takes_memory_and_is_looked_at(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", max_position_embeddings=512)
    head = write_eagle(tmp_path / "head", tmp_path / "model")
    flags = ["--model", str(tmp_path / "model"), "--dtype", "fp32", "--name", "w", "--speculation"]
    plain, heads = (needs_of(Component.WORKER, Overrides(), [*flags, *more], DEMO).engine
                    for more in (("off",), ("heads", "--draft", str(head))))  # fmt: skip
    assert plain is not None
    assert heads is not None
    weights = sum(view.numel() * 4 for name, view in load_file(head / "model.safetensors").items() if "2" not in name)
    room = (tmp_path / "model" / "model.safetensors").stat().st_size + 16 * TOKEN_BYTES * 3
    assert check_weights(heads, room + weights).level is not Level.FAIL
    assert check_weights(heads, room + weights // 2).level is Level.FAIL
    assert check_weights(plain, room + weights // 2).level is not Level.FAIL
    tensors = load_file(head / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, head / "model.safetensors")
    refused = check_weights(heads, 1 << 30)
    assert refused.level is Level.FAIL
    assert "fc.weight" in refused.text


def test_heads_of_a_checkpoint_without_one_are_refused(need: EngineNeed) -> None:
    finding = check_weights(replace(need, has_head=True), 1 << 30)
    assert finding.level is Level.FAIL
    assert "has no head: no num_nextn_predict_layers" in finding.text


def test_rounded_weights_need_less_memory(need: EngineNeed) -> None:
    finding = check_weights(replace(need, quantization="int8"), 1 << 30)
    assert "in int8 beside float32" in finding.text
    weights = (need.model / "model.safetensors").stat().st_size
    room = weights + 16 * TOKEN_BYTES
    assert check_weights(replace(need, max_model_len=16), room // 2).level is Level.FAIL
    assert check_weights(replace(need, max_model_len=16, quantization="int8"), room // 2).level is Level.OK


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_cache_of_codes_is_described_and_refused_for_latents(need: EngineNeed, tmp_path: Path, kv_dtype: str) -> None:
    finding = check_weights(replace(need, kv_dtype=kv_dtype), 1 << 30)
    assert f"KV {2 * 2 * 2 * (8 + 4)} B a token" in finding.text
    latents = write_family(tmp_path / "latents", "deepseek-v2")
    finding = check_weights(replace(need, model=latents, kv_dtype=kv_dtype), 1 << 30)
    assert finding.level is Level.FAIL
    assert "latents are not kept in" in finding.text


def test_room_for_short_sequences_alone_is_a_warning(need: EngineNeed) -> None:
    weights = (need.model / "model.safetensors").stat().st_size
    finding = check_weights(need, weights + 5 * 16 * TOKEN_BYTES)
    assert finding.level is Level.WARN
    assert "of 512 tokens" in finding.text
    assert check_weights(replace(need, max_model_len=32), weights + 5 * 16 * TOKEN_BYTES).level is Level.OK


def test_memory_for_adapters_is_kept_and_said_by_rank(need: EngineNeed) -> None:
    weights = (need.model / "model.safetensors").stat().st_size
    need, memory = replace(need, max_model_len=32), weights + 32 * TOKEN_BYTES + (1 << 20)
    assert check_weights(need, memory).level is Level.OK
    of_rank_1 = values_of_rank(load_config(need.model)) * 4
    kept = replace(need, adapter_slots=3, adapter_bytes=3 * 32 * of_rank_1)
    finding = check_weights(kept, memory + kept.adapter_bytes)
    assert finding.level is Level.OK
    assert "kept for adapters, 3 of rank 32" in finding.text
    copies = replace(kept, adapter_host_bytes=2 << 20)
    assert check_weights(copies, memory + kept.adapter_bytes).level is Level.FAIL
    on_gpu = replace(copies, device="cuda:0", dtype="fp32")  # the host's memory is not what its engine has
    assert check_weights(on_gpu, memory + kept.adapter_bytes).level is Level.OK
    finding = check_weights(replace(kept, adapter_bytes=2 << 20), memory)
    assert finding.level is Level.FAIL
    assert "adapters and 1 KV blocks do not fit" in finding.text
    finding = check_weights(replace(kept, adapter_bytes=3 * 16 * of_rank_1 - 1), memory)
    assert finding.level is Level.WARN  # rank 8 is laid out as 16 on a CPU
    assert "adapter_slots" in finding.fix


def test_a_worker_that_takes_adapters_needs_memory_for_them() -> None:
    flags = ["--model", "models/demo", "--adapter-slots", "4", "--adapter-bytes", "1000", "--adapter-host-bytes", "70"]
    without = needs_of(Component.WORKER, Overrides(), flags, DEMO).engine
    found = needs_of(Component.WORKER, Overrides(), [*flags, "--adapter-folders", "/adapters"], DEMO).engine
    assert without is not None
    assert found is not None
    assert (without.adapter_slots, without.adapter_bytes, without.adapter_host_bytes) == (0, 0, 0)
    assert (found.adapter_slots, found.adapter_bytes, found.adapter_host_bytes) == (4, 1000, 70)


@pytest.mark.parametrize("cut", [4, -100])
def test_a_file_that_was_cut_off_is_named(need: EngineNeed, cut: int) -> None:
    file = need.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    finding = check_weights(need, 1 << 30)
    assert finding.level is Level.FAIL
    assert "model.safetensors is corrupt or truncated" in finding.text


def test_a_tensor_that_is_missing_is_named(need: EngineNeed, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "small", num_layers=1)
    shutil.copy(tmp_path / "small/model.safetensors", need.model)
    finding = check_weights(need, 1 << 30)
    assert finding.level is Level.FAIL
    assert "is missing from the checkpoint: model.layers.1" in finding.text


def test_a_folder_that_is_not_there_is_a_failure(need: EngineNeed, tmp_path: Path) -> None:
    finding = check_weights(replace(need, model=tmp_path / "nowhere"), None)
    assert finding.level is Level.FAIL
    assert "No such file" in finding.text


def test_a_router_reads_the_tokenizer(need: EngineNeed) -> None:
    assert check_tokenizer(DEMO).level is Level.OK
    assert "nowhere.jinja cannot be read" in check_tokenizer(DEMO, "nowhere.jinja").text
    finding = check_tokenizer(need.model)
    assert finding.level is Level.FAIL
    assert "tokenizer.json is missing" in finding.text


def test_what_cannot_be_looked_at_is_a_finding(need: EngineNeed, tmp_path: Path) -> None:
    """As what lies in a folder that another user owns."""
    hidden = tmp_path / ("x" * 300)
    for finding in (check_weights(replace(need, model=hidden), None), check_tokenizer(hidden)):
        assert finding.level is Level.FAIL
        assert "File name too long" in finding.text
    assert check_disk(hidden, 1).check == "disk"


def test_an_address_that_no_look_up_takes_is_a_failure() -> None:
    assert check_ports({"bind": "10.0.0..1:80"}).level is Level.FAIL
