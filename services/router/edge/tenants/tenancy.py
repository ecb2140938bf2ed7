"""Which tenants share prefixes: every tenant has a salt of its own, unless its settings name a share.

A salt is the root of a hash chain, so blocks of different salts have nothing in common: no hits, and no first token
that comes sooner for what another tenant sent. A client may narrow it with `cache_salt`, vLLM's field; it cannot widen
it.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.router.edge.settings import TenantSettings
from shared.errors import InvalidRequest

MAX_CACHE_SALT_BYTES = 128


def chain_salt(tenants: Mapping[str, TenantSettings], tenant: str, cache_salt: str) -> str:
    """The salt of a tenant's prompts; empty stands for the tenant's name. Raises InvalidRequest (`cache_salt`).

    Neither a tenant's name nor a share holds a 0, so no two of the forms below are the same.
    """
    if len(cache_salt.encode()) > MAX_CACHE_SALT_BYTES or "\0" in cache_salt:
        raise InvalidRequest(
            f"cache_salt must have at most {MAX_CACHE_SALT_BYTES} bytes, none of them 0",
            field="cache_salt",
            limit=MAX_CACHE_SALT_BYTES,
        )
    settings = tenants.get(tenant)
    root = f"\0share={settings.share}" if settings is not None and settings.share is not None else tenant
    return f"{root}\0salt={cache_salt}" if cache_salt else root
