"""What a redis_url says, and what is refused without naming a password."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from services.kvstore.resp.open import redis_client
from services.kvstore.resp.redis_url import Endpoint, RedisAddress
from shared.errors import ConfigError


def test_hosts_credentials_and_database() -> None:
    address = RedisAddress.parse("redis://tand%40em:s3cr%2Fet@a:7000/3")
    assert (address.endpoints, address.redacted) == ((Endpoint("a", 7000),), "redis://a:7000/3")
    login = address.login
    assert (login.username, login.password, login.db, login.tls) == ("tand@em", "s3cr/et", 3, None)
    assert "s3cr" not in repr(address)


@pytest.mark.parametrize("url", ["redis://user@a:7000", "redis://a:7000?username=user", "redis://user:@a:7000"])
def test_a_password_beside_the_url(url: str) -> None:
    address = RedisAddress.parse(url, "s3cr/et@")
    assert (address.login.username, address.login.password) == ("user", "s3cr/et@")
    assert (str(address.endpoints[0]), "s3cr" in repr(address)) == ("a:7000", False)


@pytest.mark.parametrize("url", ["redis://:own@a", "redis://a?password=own"])
def test_two_passwords_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url names a password too") as caught:
        redis_client(url, 1.0, password="s3cret")
    assert caught.value.field == "redis_password"


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("redis://", (Endpoint("localhost", 6379),)),
        ("redis://a,b:7001,[::1]:7002", (Endpoint("a", 6379), Endpoint("b", 7001), Endpoint("::1", 7002))),
        ("redis://[fe80::1]", (Endpoint("fe80::1", 6379),)),
        ("unix:///run/valkey.sock?db=2&password=x", (Endpoint(path="/run/valkey.sock"),)),
    ],
)
def test_endpoints(url: str, endpoints: tuple[Endpoint, ...]) -> None:
    assert RedisAddress.parse(url).endpoints == endpoints


def test_tls_checks_certificates_unless_told_not_to() -> None:
    tls = RedisAddress.parse("rediss://a").login.tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (ssl.CERT_REQUIRED, True)
    tls = RedisAddress.parse("rediss://a?ssl_check_hostname=false").login.tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (ssl.CERT_REQUIRED, False)
    tls = RedisAddress.parse("rediss://a?ssl_cert_reqs=none").login.tls
    assert tls is not None
    assert tls.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://localhost",
        "localhost:6379",
        "redis://user:s3cret@host:port",
        "redis://user:s3cret@host:70000",
        "redis://user:s3cret@host/name",
        "redis://user:s3cret@host?ssl_ca_certs=/ca.pem",
        "rediss://user:s3cret@host?sll_ca_certs=/ca.pem",
        "rediss://user:s3cret@host?ssl_ca_certs=/nowhere/ca.pem",
        "redis://user:s3cret@a,b",
        "redis://user:s3cret[@host",
        "redis://user:s3cret\uff0f@host",
        "redis://user:s3cret@a..b",
    ],
)
def test_what_is_no_redis_url_is_refused_without_naming_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        redis_client(url, 1.0)
    assert caught.value.field == "redis_url"
    assert "s3cret" not in str(caught.value)


def test_a_cluster_has_no_numbered_databases(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="database"):
        redis_client("redis://a,b/1", 1.0, cluster=True)
