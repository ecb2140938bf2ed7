"""A worker that is a group starts whole or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.local.places import reserved_address
from services.worker import host, loaded_model
from services.worker.group import leader
from services.worker.host import EngineHost
from services.worker.settings import WorkerSettings
from shared.address import Address
from shared.config import load_settings
from shared.errors import ConfigError
from tests.integration.worker.held_follower import FOLDER_VARIABLE
from tests.unit.collectives.in_threads import needs_library
from tests.waiting import DEADLINE_S, until

pytestmark = needs_library


def group_settings(*flags: str) -> WorkerSettings:
    return load_settings(
        WorkerSettings,
        [
            *("--name", "d0", "--bind", "127.0.0.1:0", "--model", "models/demo", "--dtype", "fp32", "--tp", "2"),
            *("--num-threads", "2", "--num-kv-blocks", "64", "--max-num-seqs", "8"),
            *flags,
        ],
    )


@pytest.fixture(autouse=True)
def _unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is this process, which other tests need as it was."""
    monkeypatch.setattr(host, "take_share", lambda *_: None)


@pytest.mark.slow
async def test_a_start_that_fails_half_way_ends_the_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's process may live on: what is left must be none of it."""
    others = psutil.Process().children()  # of tests before this one
    followers: list[psutil.Process] = []

    def failing(*_: object, **__: object) -> None:
        followers.extend(child for child in psutil.Process().children() if child not in others)
        raise ConfigError("the runner cannot start", field="num_kv_blocks")

    monkeypatch.setattr(host, "start_runner", failing)
    engine_host = EngineHost(group_settings())
    with pytest.raises(ConfigError, match="cannot start"):
        await engine_host.start(lambda *_: None)
    assert len(followers) == 1
    _, alive = psutil.wait_procs(followers, timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    assert not alive
    await engine_host.close()


@pytest.mark.slow
async def test_the_pool_is_sized_when_all_ranks_hold_their_slices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory that a follower has not taken yet is not free."""
    choose, fingerprint = loaded_model._choose_num_blocks, loaded_model.fingerprint
    had_loaded: list[bool] = []

    def let_the_follower_load(*arguments: Any) -> str:
        (tmp_path / "go").touch()
        return fingerprint(*arguments)

    def looking(*arguments: Any, **more: Any) -> int:
        had_loaded.append((tmp_path / "loaded").exists())
        return choose(*arguments, **more)

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(leader, "FOLLOWER", "tests.integration.worker.held_follower")
    monkeypatch.setattr(loaded_model, "fingerprint", let_the_follower_load)
    monkeypatch.setattr(loaded_model, "_choose_num_blocks", looking)
    engine_host = EngineHost(group_settings())
    try:
        await engine_host.start(lambda *_: None)
    finally:
        await engine_host.close()
    assert had_loaded == [True]


async def test_a_start_that_is_cancelled_waits_for_no_further_host() -> None:
    """Pods come in any order, and some never: a process that is ended meanwhile ends."""
    with reserved_address() as leader:
        engine_host = EngineHost(group_settings("--group-hosts", "2", "--group-leader", leader))
        starting = asyncio.create_task(engine_host.start(lambda *_: None))
        await until(lambda: engine_host._group is not None or starting.done())
        assert not starting.done()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        found = Address.parse(leader, "group_leader")
        with pytest.raises(OSError):  # noqa: PT011 - nobody listens any more
            await asyncio.open_connection(found.host, found.port)
        await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), DEADLINE_S)
