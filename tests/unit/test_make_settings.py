"""A setting on make's command line counts, or stops make with the nearest that the target takes."""

from __future__ import annotations

import os
import subprocess
from types import ModuleType

import pytest
import typer
from typer.core import TyperGroup

from tandem_cli.main import build_app
from tests.unit.scripts import ROOT, load_script


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would do, without doing it, whatever settings the make around these tests was given."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def make_settings() -> ModuleType:
    return load_script("make_settings")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["run", "PREFIL=3"], "PREFIL is no setting of make run: did you mean PREFILL?"),
        (["run", "prefill=3"], "prefill is no setting of make run: did you mean PREFILL?"),
        (["run", "HTTP=a:1", "ARG=--x"], "ARG is no setting of make run: did you mean ARGS?"),
        (["chaos", "ONLI=router"], "ONLI is no setting of make chaos: did you mean ONLY?"),
        (["setup", "QUUX=1"], "QUUX is no setting of make setup: it takes WHEEL, ARGS"),
    ],
)
def test_an_unknown_setting_stops_make(arguments: list[str], why: str) -> None:
    refused = make(*arguments)
    assert refused.returncode == 2
    assert why in refused.stderr
    assert "tandem serve" not in refused.stdout


def test_known_settings_reach_tandem_serve() -> None:
    settings = ["PREFILL=3", "KV_DTYPE=bf16", "DETERMINISTIC=1", "ARGS=--store-nodes 2", "TANDEM_ROUTER_QUEUE_LIMIT=64"]
    run = make("run", *settings)
    assert run.returncode == 0, run.stderr
    flags = run.stdout.splitlines()[-1]
    assert '--kv-dtype "bf16"' in flags
    assert '--prefill "3"' in flags
    assert flags.endswith("--deterministic --store-nodes 2")


def test_each_setting_of_make_run_is_an_option_of_tandem_serve(make_settings: ModuleType) -> None:
    app = typer.main.get_command(build_app())
    assert isinstance(app, TyperGroup)
    options = {str(parameter.name) for parameter in app.commands["serve"].params}
    settings = make_settings.settings_of("run", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(settings) > 10
    assert {name.lower() for name in settings} <= options
