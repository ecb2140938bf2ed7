"""Who shares prefixes with whom, which tenant a key speaks for, and who may touch everybody's cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.router.edge.scheduling import scheduling_hints
from services.router.edge.settings import EdgeSettings, TenantSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.edge.tenants.rate_limits import chain_salt
from shared.errors import ConfigError, InvalidRequest, Unauthenticated

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
