"""Decode steps captured as CUDA graphs, one for each batch size: a step costs one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CudaGraphs:
    """Captured calls by key. They share one pool of memory, so a graph's output holds until the next replay.

    A captured call reads and writes the tensors of its capture; the caller fills them before a replay. All are captured
    on one stream: cuBLAS keeps a workspace for each stream that it was used on, some 32 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory: Any = None  # torch's opaque handle of the pool that the first graph made
        self._aside: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def capture(self, key: int, run: Callable[[], Tensor]) -> None:
        """Run it twice, so that whatever compiles or allocates at first use has done so, then record it."""
        with torch.cuda.device(self._device):
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                run()
                run()
            torch.cuda.current_stream().wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile; only this one is recorded.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._aside, capture_error_mode="thread_local"):
                output = run()
            self._memory = graph.pool()
            self._captured[key] = graph, output

    def replay(self, key: int) -> Tensor:
        """Queue the captured call; returns its output tensor, to be read in stream order before the next replay."""
        graph, output = self._captured[key]
        graph.replay()
        return output
