"""Requests and tokens a minute."""

from __future__ import annotations

import pytest

from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.edge.tenants.rate_limits import RateLimits
from shared.errors import QuotaExceeded


class Clock:
    """Set by hand, seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rates(clock: Clock, **settings: object) -> RateLimits:
    return RateLimits(EdgeSettings.model_validate(settings), clock)


def test_a_minutes_worth_of_requests_passes_and_the_next_is_told_when_to_come_back(clock: Clock) -> None:
    limits = rates(clock, limits={"requests_per_minute": 6})
    for _ in range(6):
        limits.begin("tenant a", "a")
    with pytest.raises(QuotaExceeded) as caught:
        limits.begin("tenant a", "a")
    assert caught.value.details == {"field": "requests_per_minute", "limit": 6, "retry_after_s": 10.0}
    clock.now += 9.9
    with pytest.raises(QuotaExceeded):
        limits.begin("tenant a", "a")
    clock.now += 0.2
    limits.begin("tenant a", "a")
    limits.begin("tenant b", "b")  # has an account of its own


def test_a_refused_request_costs_nothing(clock: Clock) -> None:
    limits = rates(clock, limits={"requests_per_minute": 1})
    limits.begin("x", "a")
    for _ in range(100):
        with pytest.raises(QuotaExceeded):
            limits.begin("x", "a")
    clock.now += 60
    limits.begin("x", "a")


def test_tokens_are_charged_when_they_are_known_and_paid_back_by_time(clock: Clock) -> None:
    limits = rates(clock, limits={"tokens_per_minute": 600})
    account = limits.begin("x", "a")
    account.charge(100)
    account.charge(1000)  # runs on: it is not cut off
    with pytest.raises(QuotaExceeded) as caught:
        limits.begin("x", "a")
    assert (caught.value.field, caught.value.details["limit"]) == ("tokens_per_minute", 600)
    assert caught.value.details["retry_after_s"] == pytest.approx(50.1)
    clock.now += 50.2
    limits.begin("x", "a")


def test_an_idle_account_saves_up_one_minute_only(clock: Clock) -> None:
    limits = rates(clock, limits={"requests_per_minute": 2})
    limits.begin("x", "a")
    clock.now += 3600
    for _ in range(2):
        limits.begin("x", "a")
    with pytest.raises(QuotaExceeded):
        limits.begin("x", "a")


def test_a_tenants_own_limit_counts_and_zero_is_none(clock: Clock) -> None:
    limits = rates(
        clock,
        limits={"requests_per_minute": 1},
        tenants={"big": {"requests_per_minute": 3}, "free": {"requests_per_minute": 0}},
    )
    for _ in range(3):
        limits.begin("tenant big", "big")
    with pytest.raises(QuotaExceeded):
        limits.begin("tenant big", "big")
    for _ in range(1000):
        limits.begin("tenant free", "free")


def test_accounts_that_fell_silent_are_forgotten_beyond_a_bound(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.edge.tenants.rate_limits._MAX_ACCOUNTS", 2)
    limits = rates(clock, limits={"requests_per_minute": 1})
    for name in ("a", "b", "c"):
        limits.begin(name, name)
    limits.begin("a", "a")
    with pytest.raises(QuotaExceeded):
        limits.begin("c", "c")


def test_accounts_are_keys_or_tenants_but_no_name_that_a_client_may_choose() -> None:
    keys = ApiKeys(["k1", "k2"], {"a": ["k-a", "k-a2"]})
    first, second = (keys.account(f"Bearer {key}", "chosen") for key in ("k1", "k2"))
    assert first != second
    assert first == keys.account("bearer k1", "other")
    assert "k1" not in first
    assert {keys.account(f"Bearer {key}", "a") for key in ("k-a", "k-a2")} == {"tenant a"}
    assert ApiKeys([]).account("Bearer anything", "a") == "tenant a"
