"""Whose adapters are whose, and how many a tenant may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.edge.settings import TenantSettings
from services.router.edge.tenants.adapter_rights import AdapterRights
from services.router.placement.views import NamedAdapter
from shared.errors import QuotaExceeded

RIGHTS = AdapterRights(
    {
        "a": TenantSettings(adapters=("a/*", "both"), max_adapters=2, max_adapter_bytes=100),
        "b": TenantSettings(adapters=("both", "b")),
        "c": TenantSettings(max_adapters=0),
    }
)


def adapter(name: str, num_bytes: int = 10) -> NamedAdapter:
    return NamedAdapter(name, f"digest of {name}", 8, num_bytes)


@pytest.mark.parametrize(
    ("name", "users"),
    [("a/x", "a"), ("a/", "a"), ("a", "abc"), ("both", "ab"), ("b", "b"), ("b2", "abc"), ("other", "abc")],
)
def test_a_claimed_name_is_its_tenants_alone_and_any_other_is_everybodys(name: str, users: str) -> None:
    assert "".join(tenant for tenant in "abc" if RIGHTS.may_use(tenant, name)) == users


def test_one_more_than_a_tenant_may_have_is_refused_by_number_and_by_bytes() -> None:
    RIGHTS.admit(adapter("a/2"), [adapter("a/1"), adapter("other"), adapter("b")])
    with pytest.raises(QuotaExceeded) as caught:
        RIGHTS.admit(adapter("a/2"), [adapter("a/1"), adapter("both")])
    assert caught.value.details == {"field": "max_adapters", "value": 3, "limit": 2}
    with pytest.raises(QuotaExceeded) as caught:
        RIGHTS.admit(adapter("a/2", 91), [adapter("a/1")])
    assert caught.value.details == {"field": "max_adapter_bytes", "value": 101, "limit": 100}


def test_a_reload_replaces_and_does_not_add() -> None:
    RIGHTS.admit(adapter("a/1", 90), [adapter("a/1", 90), adapter("a/2")])


def test_what_is_everybodys_counts_against_no_tenant() -> None:
    RIGHTS.admit(adapter("other", 1 << 40), [adapter(f"a/{i}") for i in range(9)])


NAMES = st.text("ab*/", min_size=1, max_size=4)


@given(st.dictionaries(st.sampled_from("abc"), st.lists(NAMES, max_size=3)), NAMES)
def test_every_adapter_has_a_user_and_owners_are_the_users_where_there_are_any(
    claims: dict[str, list[str]], name: str
) -> None:
    rights = AdapterRights({tenant: TenantSettings(adapters=tuple(names)) for tenant, names in claims.items()})
    users = {tenant for tenant in "abcd" if rights.may_use(tenant, name)}
    assert users == set(rights.owners(name)) or (not rights.owners(name) and users == set("abcd"))
