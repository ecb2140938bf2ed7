"""How decode steps are captured, with torch.cuda's parts replaced by ones that record."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from shared.engine.runner.cuda_graphs import CudaGraphs


def test_every_size_is_run_and_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[MagicMock] = []
    used: list[Any] = []

    def new_stream(_device: object) -> MagicMock:
        streams.append(MagicMock())
        return streams[-1]

    def on(stream: Any) -> nullcontext[None]:
        used.append(stream)
        return nullcontext()

    def capturing(_graph: object, *, stream: Any, **_rest: object) -> nullcontext[None]:
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
    for size in (4, 2, 1):
        graphs.capture(size, lambda size=size: torch.full((size,), size))  # type: ignore[misc]
    assert len(streams) == 1
    assert used == [streams[0]] * 6
    assert graphs.replay(2).tolist() == [2, 2]
