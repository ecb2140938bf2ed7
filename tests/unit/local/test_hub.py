"""Models and adapters by Hub ids, from a stand-in of the Hub that HF_ENDPOINT names: each fetch in its own process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.local.hub import HubModel, hub_model
from services.local.spec import DEMO_MODEL
from shared.errors import ConfigError
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.families.registry import load_config
from tests.unit.local.hub_stand_in import COMMIT, TOKEN, HubStandIn

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from services.local.hub import fetch, hub_model
from shared.errors import TandemError
for model in sys.argv[1:]:
    try:
        print(fetch(hub_model(model)))
    except TandemError as error:
        print(f"{type(error).__name__} {error.field}: {error.message}")
"""

ADAPTERS = """
import sys
from tandem_cli.up import find_adapters
from shared.errors import TandemError
for adapters in sys.argv[1:]:
    try:
        print(find_adapters(adapters))
    except TandemError as error:
        print(f"{type(error).__name__} {error.field}: {error.message}")
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/name", HubModel("org/name")),
        ("hf://org/name", HubModel("org/name")),
        ("Qwen/Qwen3-0.6B@v1.0", HubModel("Qwen/Qwen3-0.6B", "v1.0")),
        ("hf://org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("models", None),
        ("/org/name", None),
        ("./org/name", None),
        ("a/b/c", None),
        ("models/demo", None),  # it is here
        (f"/{'x' * 300}", None),  # which cannot be looked at
    ],
)
def test_what_is_an_id(monkeypatch, text, found):
    monkeypatch.chdir(ROOT)
    assert hub_model(text) == found


@pytest.mark.parametrize("text", ["hf://name", "hf://", "hf:///a/b", "hf://a/b/c", "hf://a/b@"])
def test_a_scheme_without_an_id(text):
    with pytest.raises(ConfigError, match=r"is not hf://ORG/NAME"):
        hub_model(text)


@pytest.fixture
def hub() -> HubStandIn:
    return HubStandIn(DEMO_MODEL)


@pytest.fixture
def endpoint(hub: HubStandIn) -> Iterator[str]:
    with hub.serving() as address:
        yield address


def find(home: Path, endpoint: str, *models: str, program: str = PROGRAM, **environment: str) -> list[str]:
    """What the program gives or raises for each."""
    variables = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program, *models], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_it_is_fetched_whole_after_a_break_and_found_again_offline(tmp_path, hub, endpoint):
    hub.files["original.gguf"] = b"GGUF"
    hub.files["large.safetensors"] = large = bytes(range(256)) * (3 << 14)  # the client writes 10 MiB at a time
    hub.break_once["large.safetensors"] = 11 << 20
    line, tagged = find(tmp_path, endpoint, "org/demo", "hf://org/demo@v1")
    folder = Path(line)
    assert folder.name == COMMIT
    assert tagged == line
    assert {path.name for path in folder.iterdir()} == {
        name for name in hub.files if name.endswith((".json", ".jinja", ".safetensors"))
    }
    assert (folder / "large.safetensors").read_bytes() == large
    assert [asked for name, asked in hub.gets if name == "large.safetensors"] == ["", f"bytes={10 << 20}-"]
    num_gets = len(hub.gets)
    assert find(tmp_path, "http://127.0.0.1:1", "org/demo", HF_HUB_OFFLINE="1") == [line]
    assert len(hub.gets) == num_gets


def test_what_is_not_there_or_not_allowed(tmp_path, endpoint):
    absent, revision, gated = find(tmp_path, endpoint, "org/absent", "org/demo@v9", "org/gated")
    assert absent.startswith(
        "ModelLoadError model: there is no folder org/absent here, and no model org/absent at http"
    )
    assert "HF_TOKEN" in absent
    assert revision == f"ModelLoadError model: org/demo at {endpoint} has no revision 'v9'"
    assert gated.startswith(f"ModelLoadError model: org/gated at {endpoint} is gated: accept its terms there")
    [line] = find(tmp_path, endpoint, "org/gated", HF_TOKEN=TOKEN)
    assert line.endswith(COMMIT)


def test_without_a_network_and_without_safetensors(tmp_path, hub, endpoint):
    [offline] = find(tmp_path, "http://127.0.0.1:1", "org/demo")
    assert "org/demo is not in the cache as a whole, and http://127.0.0.1:1 cannot be reached" in offline
    hub.files = {"config.json": b"{}", "model.gguf": b"GGUF"}
    [other] = find(tmp_path, endpoint, "org/demo")
    assert "has no safetensors files: other formats, such as GGUF, are not supported" in other


def test_adapters_are_fetched_by_id_and_revision_beside_those_that_lie_here(tmp_path):
    here = write_random_adapter(tmp_path / "here", load_config(DEMO_MODEL), rank=2)
    hub = HubStandIn(here, "org/tuned")
    with hub.serving() as endpoint:
        given = f"a={here},b=org/tuned@v1 c=hf://org/tuned"
        line, absent, scheme, spaces = find(
            tmp_path / "home", endpoint, given, "a=org/tuned@v9", "a=hf://x", "a=", program=ADAPTERS
        )
    found = dict(entry.split("=") for entry in line.split())
    assert found["a"] == str(here)
    assert found["b"] == found["c"]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (Path(found["b"]) / name).read_bytes() == (here / name).read_bytes()
    assert absent == f"ModelLoadError adapters: org/tuned at {endpoint} has no revision 'v9'"
    assert scheme.startswith("ConfigError adapters: adapters: hf://x is not hf://ORG/NAME")
    assert spaces == "ConfigError adapters: adapters: 'a=' is not name=folder"
