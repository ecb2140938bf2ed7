"""The router's settings, and that its core loads neither edge nor views."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.router.configured import discovery_of
from services.router.settings import RouterSettings, parse_labels
from services.router.workers.discovery import DiscoveredWorker, StaticDiscovery
from services.router.workers.file_discovery import FileDiscovery
from shared.config import load_settings
from shared.errors import ConfigError
from shared.identity import DECODE, PREFILL

BASE = ["--model", "m", "--decode", "d0=h:1"]


def test_flags_reach_admission_and_placement():
    settings = load_settings(
        RouterSettings,
        [*BASE, "--admission.order", "deadline", "--admission.tenant-weights", '{"gold": 2}',
         "--placement.prefix", "3", "--placement.prefill-here-tokens", "64"],
    )  # fmt: skip
    config = settings.placement.config(99)
    assert (config.max_queued_tokens, config.weights["prefix"], config.thresholds.short_suffix_tokens) == (99, 3.0, 64)
    assert settings.admission.order == "deadline"
    assert settings.admission.tenant_weights == {"gold": 2.0}


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--placement.tier-peer", "2"], "placement.tier_peer"),
        (["--placement.tier-store", "0.9"], "placement"),
        (["--admission.order", "random"], "admission.order"),
    ],
)
def test_a_bad_value_is_named(flags, field):
    with pytest.raises(ConfigError) as wrong:
        load_settings(RouterSettings, [*BASE, *flags])
    assert wrong.value.field == field


def test_labels():
    assert parse_labels("a=z/r, b=z", {"a", "b"}) == {"a": ("z", "r"), "b": ("z",)}
    for text in ("a", "a=", "a=z//r", "x=z"):
        with pytest.raises(ConfigError):
            parse_labels(text, {"a", "b"})


def test_the_flags_name_the_workers():
    flags = ["--model", "m", "--prefill", "p0=h:1", "--decode", "d0=[::1]:2", "--labels", "d0=z/r"]
    discovery = discovery_of(load_settings(RouterSettings, flags))
    assert isinstance(discovery, StaticDiscovery)
    assert discovery.workers == (
        DiscoveredWorker("p0", PREFILL, "h:1"),
        DiscoveredWorker("d0", DECODE, "[::1]:2", ("z", "r")),
    )


@pytest.mark.parametrize("mode", ["disaggregated", "collocated"])
def test_a_file_names_the_workers(mode):
    settings = load_settings(RouterSettings, ["--model", "m", "--workers-file", "/etc/workers.yaml", "--mode", mode])
    discovery = discovery_of(settings)
    assert isinstance(discovery, FileDiscovery)
    assert "/etc/workers.yaml" in discovery.failure
    assert discovery.workers == ()


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ([], "decode"),
        (["--prefill", "p0=h:1"], "decode"),
        (["--decode", "d0=h:1"], "prefill"),
        (["--decode", "d0=h:1", "--prefill", "d0=h:2"], "prefill"),
        (["--decode", "d0=h:1", "--prefill", "p0=h"], "prefill"),
        (["--decode", "d0=h:1", "--prefill", "p0=h:2", "--mode", "collocated"], "prefill"),
        (["--workers-file", "w.yaml", "--decode", "d0=h:1"], "decode"),
        (["--workers-file", "w.yaml", "--prefill", "p0=h:1"], "prefill"),
        (["--workers-file", "w.yaml", "--labels", "d0=z"], "labels"),
        (["--discovery", "kubernetes"], "kubernetes.selector"),
        (["--discovery", "kubernetes", "--kubernetes.selector", "a=b", "--decode", "d0=h:1"], "decode"),
        (["--discovery", "kubernetes", "--kubernetes.selector", "a=b", "--labels", "d0=z"], "labels"),
        (["--discovery", "kubernetes", "--kubernetes.selector", "a=b", "--workers-file", "w.yaml"], "workers_file"),
        (["--discovery", "kubernetes", "--kubernetes.selector", "a=b"], "kubernetes.kubeconfig"),
        (["--decode", "d0=h:1", "--prefill", "p0=h:1", "--kubernetes.selector", "a=b"], "kubernetes.selector"),
    ],
)
def test_workers_that_cannot_be_are_refused_by_the_name_of_the_setting(flags, field):
    with pytest.raises(ConfigError) as wrong:
        discovery_of(load_settings(RouterSettings, ["--model", "m", *flags]))
    assert wrong.value.field == field
    if "--workers-file" in flags and "--discovery" not in flags:
        assert "workers_file" in wrong.value.message


ROUTER = Path(__file__).parents[3] / "services" / "router"


@pytest.mark.parametrize("room", ["admission", "placement", "workers", "dispatch"])
def test_the_core_loads_neither_the_edge_nor_the_views(room: str) -> None:
    names = [f"services.router.{room}.{file.stem}" for file in sorted((ROUTER / room).glob("*.py"))]
    assert names
    program = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in sys.modules if name.startswith(('services.router.views', 'services.router.edge'))])"
    )
    found = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
