"""`--target`."""

from __future__ import annotations

import pytest

from loadtest.clients.connect import make_client
from loadtest.clients.grpc_client import GrpcClient
from loadtest.clients.http_client import HttpClient
from loadtest.clients.target import Target, parse_target
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("grpc://10.0.0.1:50051", Target("grpc", "10.0.0.1", 50051)),
        ("grpc://router", Target("grpc", "router", 50051)),
        ("http://localhost:8000", Target("http", "localhost", 8000)),
        ("http://localhost:8000/v1/", Target("http", "localhost", 8000)),
        ("https://host/llm/v1", Target("https", "host", 443, "/llm")),
        ("http://[::1]:8000", Target("http", "::1", 8000)),
    ],
)
def test_targets_are_read(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["localhost:8000", "ftp://host", "http://", "http://host:port", "grpc://host:1/path", "", "http://[::1"]
)
def test_anything_else_is_told_the_two_forms(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_target(text)
    assert raised.value.field == "target"


def test_the_scheme_chooses_the_client() -> None:
    assert isinstance(make_client(parse_target("grpc://h:1")), GrpcClient)
    assert isinstance(make_client(parse_target("http://h:1")), HttpClient)


def test_an_ipv6_target_keeps_its_brackets() -> None:
    target = parse_target("grpc://[::1]")
    assert (str(target), target.address) == ("grpc://[::1]:50051", "[::1]:50051")
