"""Weights read again over a pool of the size before."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from services.worker import host
from services.worker.host import EngineHost
from services.worker.machine.pool_size import PoolNeed
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.engine.runner.pool_memory import MemoryBudget
from shared.engine.runner.profile_run import POOL_SHARE
from shared.errors import ConfigError

SEGMENT_BYTES = 2 << 20
"""What torch takes of a GPU at once."""


async def test_graphs_that_take_a_segment_more_the_second_time_leave_the_pool_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool took all that there was; a worker that refused its own would end."""
    monkeypatch.setattr(host, "take_cores", lambda *_: None)  # other tests need this process as it was
    measured = count()

    def as_on_a_gpu(*_: Any, **__: Any) -> MemoryBudget:
        return MemoryBudget(256 << 20, (128 << 20) + next(measured) * SEGMENT_BYTES, POOL_SHARE)

    monkeypatch.setattr(PoolNeed, "budget", as_on_a_gpu)
    monkeypatch.setattr("services.worker.loaded_model.most_blocks", lambda *_: 1 << 30)
    flags = ("--name", "d0", "--bind", "127.0.0.1:0", "--model", "models/demo", "--dtype", "fp32", "--num-threads", "1")
    engine_host = EngineHost(load_settings(WorkerSettings, list(flags)))
    try:
        await engine_host.start(lambda *_: None)
        num_blocks, block_bytes = engine_host.model.num_blocks, engine_host.model.layout.block_bytes
        assert num_blocks == int((128 << 20) * POOL_SHARE) // block_bytes
        await engine_host.unload()
        await engine_host.reload(engine_host.folder)
        assert engine_host.model.num_blocks == num_blocks

        await engine_host.unload()
        for _ in range(2):  # what a pool of that size has no room for at all is refused as ever
            next(measured)
        with pytest.raises(ConfigError, match=f"{num_blocks} KV blocks .* do not fit"):
            await engine_host.reload(engine_host.folder)
    finally:
        await engine_host.close()
