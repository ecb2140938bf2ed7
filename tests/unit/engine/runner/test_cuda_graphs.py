"""How calls are captured, with torch.cuda's parts replaced by ones that record."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from shared.engine.runner.cuda_graphs import CudaGraphs


def test_every_call_is_run_and_captured_on_one_stream_with_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[MagicMock] = []
    used: list[Any] = []
    pools: list[object] = []

    def new_stream(_device: object) -> MagicMock:
        streams.append(MagicMock())
        return streams[-1]

    def on(stream: Any) -> nullcontext[None]:
        used.append(stream)
        return nullcontext()

    def capturing(_graph: object, *, pool: object, stream: Any, **_rest: object) -> nullcontext[None]:
        pools.append(pool)
        return on(stream)

    for name, fake in (
        ("Stream", new_stream),
        ("stream", on),
        ("current_stream", MagicMock()),
        ("device", lambda _device: nullcontext()),
        ("CUDAGraph", MagicMock),
        ("graph", capturing),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = CudaGraphs(torch.device("cuda"))
    captured = [graphs.capture(lambda size=size: torch.full((size,), size)) for size in (4, 2, 1)]  # type: ignore[misc]
    assert len(streams) == 1
    assert used == [streams[0]] * 6
    assert [output.tolist() for _, output in captured] == [[4] * 4, [2] * 2, [1]]
    assert pools == [None, captured[0][0].pool(), captured[1][0].pool()]  # type: ignore[attr-defined]
