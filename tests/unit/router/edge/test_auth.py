"""API keys."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.router.edge.auth import ApiKeys
from services.router.edge.settings import EdgeSettings
from shared.errors import Unauthenticated


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


def test_keys_do_not_show_in_logs_of_the_settings() -> None:
    assert "secret" not in repr(EdgeSettings(api_keys=("secret",)))
