"""A cluster that cannot start says why, in a typed error; what can be known beforehand, before any process starts."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from shared.errors import ConfigError, ModelLoadError, TandemError
from tests.e2e.running import DEMO


async def early_error(tmp_path: Path, model: Path, **spec) -> TandemError:
    """One that comes before any process."""
    error = await start_error(tmp_path, model, **spec)
    assert not (tmp_path / "logs").exists()
    return error


async def start_error(tmp_path: Path, model: Path, **spec) -> TandemError:
    wanted = ClusterSpec(model=model, **{"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "state_dir": tmp_path, **spec})
    with pytest.raises(TandemError) as caught:
        async with LocalCluster(wanted):
            pytest.fail("the cluster started")
    return caught.value


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the demo model, to be broken."""
    return Path(shutil.copytree(DEMO, tmp_path / "broken"))


def edit_config(model: Path, **changes) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


async def test_a_missing_model_folder(tmp_path):
    error = await early_error(tmp_path, tmp_path / "nowhere")
    assert isinstance(error, ModelLoadError)
    assert "nowhere" in error.message


async def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path, model):
    edit_config(model, architectures=["MambaForCausalLM"])
    error = await early_error(tmp_path, model)
    assert isinstance(error, ModelLoadError)
    assert "MambaForCausalLM" in error.message
    assert "LlamaForCausalLM" in error.message


async def test_truncated_weights_name_their_file(tmp_path, model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    error = await early_error(tmp_path, model)
    assert isinstance(error, ModelLoadError)
    assert "model.safetensors" in error.message


@pytest.mark.slow
async def test_missing_tensors_are_named(tmp_path, model):
    edit_config(model, num_hidden_layers=json.loads((model / "config.json").read_text())["num_hidden_layers"] + 1)
    error = await start_error(tmp_path, model)
    assert isinstance(error, ModelLoadError)
    assert "model.layers." in error.message


async def test_an_absent_tokenizer(tmp_path, model):
    (model / "tokenizer.json").unlink()
    error = await early_error(tmp_path, model)
    assert isinstance(error, ModelLoadError)
    assert "tokenizer.json" in error.message


@pytest.mark.parametrize(
    ("variable", "value", "field", "why"),
    [
        ("TANDEM_ROUTER_QUEUE_LIMIT", "0", "queue_limit", "greater than or equal to 1"),
        ("TANDEM_ROUTER_QEUE_LIMIT", "3", "TANDEM_ROUTER_QEUE_LIMIT", "did you mean TANDEM_ROUTER_QUEUE_LIMIT"),
        ("TANDEM_ROUTER_LABELS", "decode-7=a", "labels", "there is no worker 'decode-7'"),
        ("TANDEM_WORKER_MAX_NUM_SEQS", "-1", "max_num_seqs", "greater than or equal to 0"),
        ("TANDEM_KVSTORE_REDIS_TIMEOUT", "1", "TANDEM_KVSTORE_REDIS_TIMEOUT", "TANDEM_KVSTORE_REDIS_TIMEOUT_S"),
    ],
)
async def test_a_wrong_setting_of_any_service(tmp_path, monkeypatch, variable, value, field, why):
    monkeypatch.setenv(variable, value)
    error = await early_error(tmp_path, DEMO)
    assert isinstance(error, ConfigError)
    assert error.field == field
    assert why in error.message


@pytest.mark.parametrize("field", ["http", "grpc"])
async def test_a_port_in_use_is_named(tmp_path, field):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = await early_error(tmp_path, DEMO, **{field: address})
    assert isinstance(error, ConfigError)
    assert error.field == field
    assert address in error.message
