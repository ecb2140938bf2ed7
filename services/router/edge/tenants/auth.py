"""Bearer API keys, the same for HTTP and gRPC. Only their SHA-256 digests are kept."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.router.edge.key_digest import key_digest
from services.router.edge.scheduling import SchedulingHints, scheduling_hints
from services.router.edge.settings import EdgeSettings
from shared.errors import ConfigError, Unauthenticated

_SCHEME = "bearer "
CALLER = "tandem.caller"
"""Key of a call's `Caller` in the ASGI scope, where it comes from within the router."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant for which the router calls its own API, without a key."""

    tenant: str
    account: str
    """The account whose rates the call counts against."""


class ApiKeys:
    """The accepted keys; with none, every call is accepted."""

    def __init__(
        self, keys: Sequence[str], tenants: Mapping[str, Sequence[str]] | None = None, admin_keys: Sequence[str] = ()
    ) -> None:
        """Keys are plain or `sha256:<hex>`. `tenants` are keys by the tenant that they speak for. Raises ConfigError
        for a key that two of them have."""
        self._keys = [(key_digest(key), "") for key in keys]
        self._keys += [(key_digest(key), tenant) for tenant, own in (tenants or {}).items() for key in own]
        self._admin_keys = [key_digest(key) for key in admin_keys]
        if len({key for key, _ in self._keys}) < len(self._keys):
            raise ConfigError("edge: an API key is named twice, or by two tenants", field="edge.tenants")

    @classmethod
    def of(cls, settings: EdgeSettings) -> ApiKeys:
        """The keys of the settings."""
        tenants = {name: tenant.api_keys for name, tenant in settings.tenants.items()}
        return cls(settings.api_keys, tenants, settings.admin_keys)

    def check(self, authorization: str | None) -> str:
        """The tenant that the key speaks for, empty for a key without a tenant; or raises Unauthenticated.

        `authorization` is the header's or metadata entry's value. Compares with every key in constant time: the time
        taken depends on no key.
        """
        if not self._keys and not self._admin_keys:
            return ""
        offered = _offered(authorization)
        known, tenant = False, ""
        for key, owner in (*self._keys, *((key, "") for key in self._admin_keys)):
            if hmac.compare_digest(key, offered):
                known, tenant = True, owner
        if not known:
            raise Unauthenticated("the API key is not known here", field="authorization")
        return tenant

    def account(self, authorization: str | None, tenant: str) -> str:
        """Whose requests and tokens are counted together: a key's that speaks for no tenant, else the tenant's.

        For an `authorization` that `check` accepted; `tenant` is the request's.
        """
        if (self._keys or self._admin_keys) and not self.check(authorization):
            return f"key {_offered(authorization)}"
        return f"tenant {tenant}"

    def check_admin(self, authorization: str | None) -> None:
        """Passes for an admin key, and for everyone where there are no keys at all; or raises Unauthenticated."""
        if not self._keys and not self._admin_keys:
            return
        if not self._admin_keys:
            raise Unauthenticated("this needs an admin key, and edge.admin_keys is empty", field="authorization")
        offered = _offered(authorization)
        known = False
        for key in self._admin_keys:
            known |= hmac.compare_digest(key, offered)
        if not known:
            raise Unauthenticated("this needs an admin key", field="authorization")


def _offered(authorization: str | None) -> str:
    """The digest of the key that was sent."""
    if authorization is None:
        raise Unauthenticated("an API key is needed: send `Authorization: Bearer KEY`", field="authorization")
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated("the authorization must be `Bearer KEY`", field="authorization")
    return key_digest(authorization[len(_SCHEME) :].strip(), plain=True)


def identified(headers: Mapping[str, str], keys: ApiKeys, caller: Caller | None) -> tuple[SchedulingHints, str]:
    """A call's hints, and whose rates it counts against; `caller`: it comes from within the router. Raises
    Unauthenticated, and InvalidRequest naming a header."""
    if caller is not None:
        return scheduling_hints(headers, caller.tenant), caller.account
    key = credentials(headers)
    hints = scheduling_hints(headers, keys.check(key))
    return hints, keys.account(key, hints.tenant)


def credentials(headers: Mapping[str, str]) -> str | None:
    """The authorization header, or Anthropic's `x-api-key` as one."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")
