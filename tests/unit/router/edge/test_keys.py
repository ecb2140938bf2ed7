"""Whose key it is, and what it opens."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.router.edge.scheduling import scheduling_hints
from services.router.edge.settings import EdgeSettings, TenantSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.edge.tenants.rate_limits import chain_salt
from services.router.settings import RouterSettings
from shared.config import load_settings
from shared.errors import ConfigError, InvalidRequest, Unauthenticated


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


SHARING = {"a": TenantSettings(share="team"), "b": TenantSettings(share="team"), "c": TenantSettings()}

names = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=6)
salts = st.text(max_size=6).filter(lambda text: "\0" not in text)


def test_a_tenant_shares_with_those_that_name_the_same_share_and_with_nobody_else() -> None:
    assert chain_salt(SHARING, "a", "") == chain_salt(SHARING, "b", "")
    assert len({chain_salt(SHARING, tenant, "") for tenant in ("a", "c", "team", "unknown", "default")}) == 5


@given(names, salts, names, salts)
def test_only_the_same_tenant_and_cache_salt_give_the_same_salt(a: str, salt_a: str, b: str, salt_b: str) -> None:
    same = chain_salt({}, a, salt_a) == chain_salt({}, b, salt_b)
    assert same == ((a, salt_a) == (b, salt_b))
    assert chain_salt({a: TenantSettings(share=b)}, a, salt_a) != chain_salt({}, b, salt_b)


@pytest.mark.parametrize("salt", ["x" * 129, "é" * 65, "a\0b"])
def test_a_cache_salt_that_is_too_long_or_ambiguous_is_refused(salt: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chain_salt({}, "a", salt)
    assert (caught.value.field, caught.value.details["limit"]) == ("cache_salt", 128)


def test_a_tenants_key_speaks_for_it_and_the_header_must_agree() -> None:
    keys = ApiKeys(["open"], {"a": ["k-a", "k-a2"]}, ["root"])
    assert [keys.check(f"Bearer {key}") for key in ("open", "k-a", "k-a2", "root")] == ["", "a", "a", ""]
    with pytest.raises(Unauthenticated):
        keys.check("Bearer k-b")
    assert scheduling_hints({}, "a").tenant == scheduling_hints({"x-tenant": "a"}, "a").tenant == "a"
    assert scheduling_hints({"x-tenant": "b"}).tenant == "b"
    with pytest.raises(Unauthenticated) as caught:
        scheduling_hints({"x-tenant": "b"}, "a")
    assert caught.value.field == "x-tenant"


@pytest.mark.parametrize("authorization", [None, "Bearer open", "Bearer k-a", "root"])
def test_only_an_admin_key_opens_the_cache(authorization: str | None) -> None:
    keys = ApiKeys(["open"], {"a": ["k-a"]}, ["root"])
    keys.check_admin("Bearer root")
    with pytest.raises(Unauthenticated):
        keys.check_admin(authorization)


def test_without_any_key_everyone_is_an_admin_and_without_an_admin_key_nobody() -> None:
    ApiKeys([]).check_admin(None)
    with pytest.raises(Unauthenticated, match="admin_keys is empty"):
        ApiKeys(["open"]).check_admin("Bearer open")


def test_one_key_of_two_tenants_is_a_bad_setting() -> None:
    with pytest.raises(ConfigError, match="two tenants"):
        ApiKeys([], {"a": ["k"], "b": ["k"]})
    with pytest.raises(ValidationError):
        EdgeSettings.model_validate({"tenants": {"a b": {}}})
    assert "secret" not in repr(
        EdgeSettings(admin_keys=("secret",), tenants={"a": TenantSettings(api_keys=("secret",))})
    )
