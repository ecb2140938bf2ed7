"""The tandem command speaks TLS to a router, by flags or by the environment."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.integration.router_edge.conftest import Edge, StartEdge
from tests.tls_files import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def tandem(edge: Edge, *arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """(exit status, stdout, stderr) of a command against the edge."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.main", *arguments, "--target", edge.grpc_address),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_flags_and_environment(start_edge: StartEdge, authority: Authority) -> None:
    edge = await start_edge(tls=authority.settings("router"))
    edge.says("hello")
    cert, key = authority.issue("operator")
    flags = ["--ca", f"{authority.cert}", "--cert", f"{cert}", "--key", f"{key}"]
    status, out, err = await tandem(edge, "generate", "hi", "-n", "20", *flags)
    assert (status, out.strip()) == (0, "hello"), err
    environment = {"TANDEM_CA": f"{authority.cert}", "TANDEM_CERT": f"{cert}", "TANDEM_KEY": f"{key}"}
    status, out, err = await tandem(edge, "status", **environment)
    assert status == 0, err
    assert "prefix hits" in out


async def test_without_its_authority_or_a_certificate_nothing_is_said(
    start_edge: StartEdge, authority: Authority
) -> None:
    edge = await start_edge(tls=authority.settings("router-2"))
    cert, key = authority.issue("operator-2")
    for flags in ([], ["--tls", "--cert", f"{cert}", "--key", f"{key}"], ["--ca", f"{authority.cert}"]):
        status, _, err = await tandem(edge, "status", *flags)
        assert status == 1
        assert "nothing listens at" in err
    status, _, err = await tandem(edge, "status", "--ca", f"{authority.cert}", "--cert", f"{cert}")
    assert (status, "cert and key go together" in err) == (2, True)


async def test_the_name_in_the_certificate(start_edge: StartEdge, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("pod", "DNS:tandem.svc")
    edge = await start_edge(tls={"cert": f"{cert}", "key": f"{key}"})
    edge.says("hello")
    ca = ["--ca", f"{authority.cert}"]
    assert (await tandem(edge, "generate", "hi", "-n", "20", *ca, "--server-name", "tandem.svc"))[:2] == (0, "hello\n")
    assert (await tandem(edge, "status", *ca, "--server-name", "another.svc"))[0] == 1
