"""Which adapters are whose, and how many a tenant may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.router.edge.settings import TenantSettings
from services.router.placement.views import NamedAdapter
from shared.errors import QuotaExceeded


class AdapterRights:
    """By adapters' names, as the tenants' settings have them: a name that some tenants claim is theirs alone, one that
    none claims is everybody's. Pure policy."""

    def __init__(self, tenants: Mapping[str, TenantSettings]) -> None:
        self._tenants = {name: tenant for name, tenant in tenants.items() if tenant.adapters}

    def owners(self, adapter: str) -> list[str]:
        """The tenants that claim this name; empty: all tenants may use it."""
        return [name for name, tenant in self._tenants.items() if any(_fits(own, adapter) for own in tenant.adapters)]

    def may_use(self, tenant: str, adapter: str) -> bool:
        """Whether the adapter is there for the tenant at all: its name in requests and lists."""
        owners = self.owners(adapter)
        return not owners or tenant in owners

    def admit(self, adapter: NamedAdapter, present: Iterable[NamedAdapter]) -> None:
        """Passes where each owner may have this adapter besides those `present`, of which one of the same name makes
        way; raises QuotaExceeded (`max_adapters`, `max_adapter_bytes`)."""
        others = [other for other in present if other.name != adapter.name]
        for owner in self.owners(adapter.name):
            settings = self._tenants[owner]
            own = [other for other in others if owner in self.owners(other.name)]
            _check(owner, "max_adapters", "adapters", len(own) + 1, settings.max_adapters)
            num_bytes = adapter.num_bytes + sum(other.num_bytes for other in own)
            _check(owner, "max_adapter_bytes", "bytes of adapters", num_bytes, settings.max_adapter_bytes)


def _fits(own: str, adapter: str) -> bool:
    return adapter.startswith(own[:-1]) if own.endswith("*") else adapter == own


def _check(tenant: str, field: str, what: str, value: int, limit: int | None) -> None:
    if limit is not None and value > limit:
        raise QuotaExceeded(
            f"tenant {tenant} would have {value} {what}; {field} is {limit}", field=field, value=value, limit=limit
        )
