"""The router's settings say what is wrong with a bad value."""

from __future__ import annotations

import pytest

from services.router.settings import RouterSettings, parse_labels
from shared.config import load_settings
from shared.errors import ConfigError

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
        (["--placement.tie-margin", "2"], "placement.tie_margin"),
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
