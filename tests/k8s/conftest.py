"""One control plane for all tests of a test process, and a namespace of its own for each."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.k8s.api_server import ApiServer
from tests.k8s.programs import Missing
from tests.waiting import until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that lies here is marked k8s."""
    here = str(Path(__file__).parent) + os.sep
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.k8s)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The running control plane. A test that stops it starts it again."""
    try:
        server = ApiServer(tmp_path_factory.mktemp("kubernetes"))
    except Missing as missing:
        pytest.skip(str(missing))
    with server:
        yield server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A new namespace. It is left behind: deleting takes longer than the control plane lives."""
    name = f"test-{secrets.token_hex(4)}"
    api_server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture(autouse=True)
async def connections_end(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Calls that are cancelled leave TLS connections behind that say goodbye in the background: where the event loop
    ended before, their sockets would be found by, and charged to, whatever test comes then."""
    yield
    if "api_server" in request.fixturenames:
        port = request.getfixturevalue("api_server").port
        await until(lambda: not connected_to(port))


def connected_to(port: int) -> list[object]:
    """This process's connections to that port."""
    return [each for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == port]
