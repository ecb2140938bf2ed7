"""API keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.settings import RouterSettings
from shared.config import load_settings
from shared.errors import ConfigError, Unauthenticated


@pytest.mark.parametrize("value", ["Bearer k2", "bearer k1", "BEARER  k1 "])
def test_each_key_passes_whatever_the_schemes_case(value: str) -> None:
    ApiKeys(["k1", "k2"]).check(value)


@pytest.mark.parametrize("value", [None, "", "k1", "Basic k1", "Bearer", "Bearer ", "Bearer k", "Bearer k11"])
def test_anything_else_is_refused(value: str | None) -> None:
    with pytest.raises(Unauthenticated):
        ApiKeys(["k1", "k2"]).check(value)


def test_without_keys_the_door_is_open() -> None:
    ApiKeys([]).check(None)


@pytest.mark.parametrize("key", ["", "a b", "é"])
def test_a_key_that_could_never_match_is_a_bad_setting(key: str) -> None:
    with pytest.raises(ValidationError):
        EdgeSettings(api_keys=(key,))


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_a_key_may_be_given_as_its_digest_which_is_no_key_itself() -> None:
    for form in (digest("k1"), digest("k1").upper().replace("SHA", "sha")):
        keys = ApiKeys.of(EdgeSettings(api_keys=(form,), admin_keys=(digest("root"),)))
        keys.check("Bearer k1")
        keys.check_admin("Bearer root")
        for wrong in (digest("k1"), digest("root"), digest("k1").removeprefix("sha256:")):
            with pytest.raises(Unauthenticated):
                keys.check(f"Bearer {wrong}")


def test_only_digests_of_keys_are_kept() -> None:
    settings = EdgeSettings.model_validate(
        {"api_keys": ["plain-1"], "admin_keys": ["plain-2"], "tenants": {"a": {"api_keys": ["plain-3"]}}}
    )
    assert settings.api_keys == (digest("plain-1"),)
    dumped = settings.model_dump_json() + repr(settings) + str(vars(ApiKeys.of(settings)))
    assert "plain-" not in dumped


def test_a_plain_and_a_hashed_form_of_one_key_are_the_same_key() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        ApiKeys.of(EdgeSettings(api_keys=("k1", digest("k1"))))


BAD = "hush hush"  # a space, which no key may have


@pytest.mark.parametrize(
    ("flags", "content"),
    [
        (["--edge.api-keys", BAD], ""),
        ([], f"edge: {{api_keys: ['{BAD}']}}"),
        ([], f"edge: {{tenants: {{a: {{api_keys: ['{BAD}']}}}}}}"),
        ([], f"edge: {{admin_keyz: ['{BAD}']}}"),
        ([], f"edge: '{BAD}'"),
        (["--edge.tenants", f'{{"a": {{"api_keys": "{BAD}"}}}}'], ""),
    ],
)
def test_errors_of_settings_do_not_show_what_may_be_a_key(tmp_path: Path, flags: list[str], content: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(RouterSettings, ["--model", "m", "--config", str(file), *flags])
    assert "hush" not in caught.value.message
    assert caught.value.__cause__ is None


def test_errors_of_other_settings_show_the_value() -> None:
    with pytest.raises(ConfigError, match="got '-7'"):
        load_settings(RouterSettings, ["--model", "m", "--queue-limit", "-7"])
    with pytest.raises(ConfigError, match="got '0'"):
        load_settings(RouterSettings, ["--model", "m", "--edge.limits.max-header-bytes", "0"])


def test_help_shows_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("edge: {admin_keys: [hush-1], tenants: {a: {api_keys: [hush-2]}}}")
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__API_KEYS", '["hush-3"]')
    with pytest.raises(SystemExit):
        load_settings(RouterSettings, ["--config", str(file), "--help"])
    shown = capsys.readouterr().out
    assert "--edge.api-keys" in shown
    assert "hush" not in shown
