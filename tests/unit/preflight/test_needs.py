"""What is looked at follows from the settings that the component would start with."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.preflight.component import Component
from services.preflight.needs import Overrides, needs_of
from shared.errors import ConfigError, InvalidRequest

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
