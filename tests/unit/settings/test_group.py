"""A group of settings names what is wrong as users call it, and finds what it has in common with another."""

from __future__ import annotations

import pytest
from pydantic import Field, SecretStr

from shared.errors import ConfigError
from shared.settings.group import CheckedGroup, SettingGroup, option_names, values_in_common


class Sizes(SettingGroup):
    """What two kinds of settings share."""

    limit_bytes: int = Field(default=8, ge=1)
    """Most memory."""
    order: str = "fcfs"
    """Of requests."""


class Cluster(Sizes, CheckedGroup):
    """Settings that code builds."""

    num_parts: int = Field(default=1, ge=1, le=4, validation_alias="parts")
    """How many."""
    key: SecretStr = SecretStr("")
    """A secret."""
    label: str = ""
    """Its own."""


class Service(Sizes):
    """Settings of a process, with a field of the same name as one of the cluster and another meaning."""

    label: str = "x"
    """The process's."""


@pytest.mark.parametrize(
    ("values", "field", "why"),
    [
        ({"limit_bytes": 0}, "limit_bytes", "greater than or equal to 1 (got 0)"),
        ({"num_parts": 5}, "parts", "less than or equal to 4 (got 5)"),
        ({"parts": 0}, "parts", "greater than or equal to 1 (got 0)"),
        ({"colour": "red"}, "colour", "not permitted"),
    ],
)
def test_a_bad_value_is_named_as_users_call_it(values: dict[str, object], field: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Cluster(**values)
    assert refused.value.field == field
    assert refused.value.message.startswith(f"setting {field}: ")
    assert why in refused.value.message


def test_a_secret_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as refused:
        Cluster(key=123456)
    assert "123456" not in refused.value.message


def test_a_copy_with_other_values_is_checked() -> None:
    cluster = Cluster(parts=2, label="a")
    assert cluster.replace(num_parts=3, order="lifo") == Cluster(num_parts=3, order="lifo", label="a")
    assert cluster.values_of(Sizes) == {"limit_bytes": 8, "order": "fcfs"}
    with pytest.raises(ConfigError):
        cluster.replace(num_parts=9)


def test_options_have_the_names_that_users_have_for_them() -> None:
    assert option_names(Cluster)["parts"] == "num_parts"
    assert option_names(Cluster)["order"] == "order"


def test_what_two_have_in_common_are_the_given_values_of_groups_that_both_inherit() -> None:
    assert values_in_common(Cluster(limit_bytes=9, label="mine", parts=3), Service) == {"limit_bytes": 9}
    assert values_in_common(Cluster(limit_bytes=8).replace(parts=3), Service) == {"limit_bytes": 8}
    assert values_in_common(Cluster().replace(parts=3), Service) == {}
