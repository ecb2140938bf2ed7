"""Which workers a router takes for its own model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.router.workers.discovery import StaticDiscovery
from services.router.workers.fleet import Fleet
from shared.errors import ModelMismatch
from shared.kv.layout import BlockLayout, KVFormat
from shared.model.text.texts_digest import texts_digest
from shared.rpc.convert import layout_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2

DEMO = Path(__file__).parents[4] / "models" / "demo"


def welcome(digest: str) -> types_pb2.Welcome:
    layout = layout_to_proto(BlockLayout(2, 16, KVFormat("float32", 2, 8)))
    return types_pb2.Welcome(model_name="m", model_fingerprint="f", layout=layout, texts_digest=digest)


@pytest.mark.parametrize(("router", "worker"), [("a", "a"), ("a", ""), ("", "b"), ("", "")])
def test_a_worker_of_the_same_texts_or_of_unknown_ones_is_taken(router: str, worker: str) -> None:
    fleet = Fleet("r", StaticDiscovery.of({}, {}), lambda: None, texts_digest=router)
    fleet._check("w", welcome(worker))
    assert fleet.model_fingerprint == "f"


def test_a_worker_of_another_models_texts_is_refused() -> None:
    fleet = Fleet("r", StaticDiscovery.of({}, {}), lambda: None, texts_digest="a")
    with pytest.raises(ModelMismatch, match=r"serves m, whose config.json and tokenizer.json are not those"):
        fleet._check("w", welcome("b"))
    assert fleet.layout is None


def test_a_digest_depends_on_configuration_and_vocabulary_alone(tmp_path: Path) -> None:
    same = Path(shutil.copytree(DEMO, tmp_path / "same"))
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    (same / "model.safetensors").unlink()
    assert texts_digest(same) == texts_digest(DEMO) != ""
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert texts_digest(same) != texts_digest(DEMO)
    (same / "tokenizer.json").unlink()
    assert texts_digest(same) == ""
