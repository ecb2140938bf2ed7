"""One parser of host:port, for settings that name one server and for those that name several."""

from __future__ import annotations

import string
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import MAX_PORT, Address, parse_named
from shared.errors import ConfigError

LABELS = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=20)
NAMES = st.lists(LABELS, min_size=1, max_size=3).map(".".join) | LABELS.map("{}.".format)
ADDRESSES = st.builds(
    Address,
    NAMES | st.ip_addresses().map(str) | st.integers(1, 9).map(lambda zone: f"fe80::1%eth{zone}"),
    st.integers(0, MAX_PORT),
)


@given(ADDRESSES)
def test_an_address_survives_its_text(address: Address) -> None:
    assert Address.parse(str(address), "http") == address


@given(st.text("ab1:[]%.=,²/ ", max_size=12))
def test_any_text_is_an_address_or_a_typed_error_that_names_the_setting(text: str) -> None:
    try:
        address = Address.parse(text, "http")
    except ConfigError as caught:
        error = caught
    else:
        assert address.host
        assert 0 <= address.port <= MAX_PORT
        assert Address.parse(str(address), "http") == address
        return
    assert (error.field, error.details["value"]) == ("http", text)
    assert repr(text) in error.message


@pytest.mark.parametrize(
    "text",
    [
        *("", "8000", "host:", ":80", "host:port", "host:70000", "host:-1", "host:²", "host: 1", "host:000080"),
        " host:1",
        *("10.0.0..1:80", ".host:80", ".:80", f"{'h' * 64}:80"),  # which no look-up takes
    ],
)
def test_what_is_no_address_names_the_setting(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text, "http")
    assert caught.value.field == "http"


def test_ipv6_brackets_are_taken_off() -> None:
    assert Address.parse("[::1]:8000", "http") == Address("::1", 8000)
    assert Address.parse("[::1%lo]:0", "http") == Address("::1%lo", 0)


@pytest.mark.parametrize("text", ["::1:8000", "[::1]", "[::1]8000", "[host]:1", "[]:1", "[::1:8000", "::1]:8000"])
def test_ipv6_stands_in_brackets(text: str) -> None:
    with pytest.raises(ConfigError, match="brackets"):
        Address.parse(text, "http")


def test_ports_have_a_default_and_a_least_where_the_setting_has() -> None:
    assert Address.parse("host", "redis_url", default_port=6379) == Address("host", 6379)
    assert Address.parse("[::1]", "redis_url", default_port=6379) == Address("::1", 6379)
    assert Address.parse("host:0", "http").port == 0
    with pytest.raises(ConfigError, match="a port of 1 to 65535"):
        Address.parse("host:0", "kvstore", min_port=1)


@given(st.dictionaries(NAMES, ADDRESSES.filter(lambda address: address.port > 0 and "," not in address.host)))
def test_a_list_of_named_servers_survives_its_text(servers: dict[str, Address]) -> None:
    expected = {name: str(address) for name, address in servers.items()}
    text = ", ".join(f"{name}={address}" for name, address in expected.items())
    found = parse_named(text, "decode")
    assert found == expected
    assert list(found) == list(expected)


def test_store_nodes_may_go_by_their_address() -> None:
    assert parse_named("", "store", unnamed=True) == {}
    assert parse_named("127.0.0.1:1", "store", unnamed=True) == {"127.0.0.1:1": "127.0.0.1:1"}
    assert parse_named("a=h:1, b=h:2", "store", unnamed=True) == {"a": "h:1", "b": "h:2"}
    for wrong in ("a=h", "h:x", "=h:1", "a=h:1,a=h:2"):
        with pytest.raises(ConfigError, match="store"):
            parse_named(wrong, "store", unnamed=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("h:1", "'h:1' is not name=host:port"),
        ("a=b=h:1", "not host:port"),
        ("a=h:0", "a port of 1 to 65535"),
        ("a=h:1,a=h:2", "'a' is named twice"),
        ("a=::1:80", "brackets"),
    ],
)
def test_a_bad_list_says_what_is_wrong_with_which_entry(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_named(text, "decode")
    assert caught.value.field == "decode"


def test_ip_addresses_are_written_as_their_standard_says() -> None:
    assert str(Address("127.0.0.1", 80)) == "127.0.0.1:80"
    assert str(Address(str(IPv6Address(1)), 80)) == "[::1]:80"
