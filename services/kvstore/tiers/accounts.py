"""Accounting by tenant: quota and use of a tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.kvstore.tiers.order import EvictionOrder

OTHER = "other"
"""Shared account of tenants that no longer hold anything and are not named in the settings."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """Most bytes of one tenant's blocks in one tier; 0 = no limit but the tier's budget."""

    default: int = 0
    named: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> int:
        """The quota of one tenant."""
        return self.named.get(tenant, self.default)


@dataclass(slots=True)
class Account:
    """One tenant in one tier."""

    used_bytes: int = 0
    pinned_bytes: int = 0  # of these, those that cannot be evicted
    num_blocks: int = 0
    num_hits: int = 0  # blocks read since start
    num_evicted: int = 0
    retained_bytes: int = 0  # of the others, those that are retained
    order: EvictionOrder = field(default_factory=EvictionOrder)  # of blocks that can be evicted


class Accounts:
    """All tenants of a tier. One that holds nothing is dropped unless the settings name it; its counts are kept."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._accounts: dict[str, Account] = {}
        self._dropped = Account()

    def of(self, tenant: str) -> Account:
        """A tenant's account, created if missing."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        return account

    def room(self, tenant: str) -> float:
        """Bytes that a tenant may still store; may be negative."""
        quota = self.quotas.of(tenant)
        account = self._accounts.get(tenant)
        return quota - (account.used_bytes if account is not None else 0) if quota else float("inf")

    def pinned_bytes(self, tenant: str) -> int:
        """Bytes of a tenant that cannot be evicted."""
        account = self._accounts.get(tenant)
        return account.pinned_bytes if account is not None else 0

    def settle(self, tenant: str) -> None:
        """Drops the tenant's account if it is empty and unnamed. Call it after a block was removed."""
        account = self._accounts[tenant]
        if account.num_blocks == 0 and tenant not in self.quotas.named:
            del self._accounts[tenant]
            self._dropped.num_hits += account.num_hits
            self._dropped.num_evicted += account.num_evicted

    def all(self) -> dict[str, Account]:
        """Accounts by tenant; dropped ones together as `OTHER`, unless a tenant of that name has an account."""
        gone = {OTHER: self._dropped} if self._dropped.num_hits or self._dropped.num_evicted else {}
        return {**gone, **self._accounts}
