"""What a tenant may use: requests and tokens a minute, for each API key and tenant, and which prefixes it shares.

Two token buckets each, which hold one minute's worth and refill all the time. A request costs one of the first at its
arrival, served or not. Tokens are charged as they become known, so the second may fall below zero; the next request
waits until it is above. Every router counts by itself.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from services.router.edge.settings import EdgeSettings, TenantSettings
from shared.errors import InvalidRequest, QuotaExceeded

MAX_CACHE_SALT_BYTES = 128


def chain_salt(tenants: Mapping[str, TenantSettings], tenant: str, cache_salt: str) -> str:
    """The salt of a tenant's prompts; empty stands for the tenant's name. Raises InvalidRequest (`cache_salt`).

    A salt is the root of a hash chain, so blocks of different salts have nothing in common: no hits, and no first token
    that comes sooner for what another tenant sent. A client may narrow it with `cache_salt`, vLLM's field; it cannot
    widen it.

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


_MAX_ACCOUNTS = 65_536
"""The one that was silent for longest is forgotten first."""


class TokenBucket:
    """`per_minute` units, refilled steadily; 0 = no limit."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, into debt where need be."""
        if self.per_minute:
            self._refill(now)
            self._level -= amount

    def wait_s(self, needed: float, now: float) -> float:
        """Seconds until the bucket holds `needed`; 0 where it does."""
        if not self.per_minute:
            return 0.0
        self._refill(now)
        return max(0.0, (needed - self._level) * 60.0 / self.per_minute)

    def _refill(self, now: float) -> None:
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now


class Account:
    """The requests and tokens a minute of one key or tenant, against its rates."""

    def __init__(self, requests_per_minute: int, tokens_per_minute: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests = TokenBucket(requests_per_minute, clock())
        self._tokens = TokenBucket(tokens_per_minute, clock())

    def begin(self) -> None:
        """A request arrived; raises QuotaExceeded with the time after which to come back."""
        now = self._clock()
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            wait_s = bucket.wait_s(1.0, now)
            if wait_s > 0:
                raise QuotaExceeded(
                    f"more than {bucket.per_minute} {what} a minute; come back in {max(wait_s, 0.1):.1f} s",
                    field=f"{what}_per_minute",
                    limit=bucket.per_minute,
                    retry_after_s=wait_s,
                )
        self._requests.take(1.0, now)

    def charge(self, num_tokens: int) -> None:
        """Tokens of a prompt or of an answer."""
        self._tokens.take(num_tokens, self._clock())


class RateLimits:
    """All accounts, by the name that `ApiKeys.account` gives."""

    def __init__(self, settings: EdgeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests_per_minute = settings.limits.requests_per_minute
        self._tokens_per_minute = settings.limits.tokens_per_minute
        self._tenants: Mapping[str, TenantSettings] = settings.tenants
        self._clock = clock
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def begin(self, name: str, tenant: str) -> Account:
        """Counts a request of the account `name`, which has the tenant's limits where it has its own; raises
        QuotaExceeded."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = self._new(tenant)
            if len(self._accounts) > _MAX_ACCOUNTS:
                self._accounts.popitem(last=False)
        else:
            self._accounts.move_to_end(name)
        account.begin()
        return account

    def _new(self, tenant: str) -> Account:
        own = self._tenants.get(tenant, TenantSettings())
        requests, tokens = own.requests_per_minute, own.tokens_per_minute
        return Account(
            self._requests_per_minute if requests is None else requests,
            self._tokens_per_minute if tokens is None else tokens,
            self._clock,
        )
