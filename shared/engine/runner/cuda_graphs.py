"""Steps, or pieces of them, captured as CUDA graphs: each costs one launch instead of one for every kernel."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Replayable(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Queue it again: it reads and writes the memory of its capture."""
        ...


class CudaGraphs:
    """Captures calls. All share one pool of memory: what a call gave holds until the next replay of any, and calls
    that take over each other's tensors are replayed in the order of their captures.

    A captured call reads and writes the tensors of its capture; the caller fills them before a replay. All are captured
    on one stream: cuBLAS keeps a workspace for each stream that it was used on, some 32 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None  # torch's opaque handle of the pool that the first graph made
        self._aside: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def capture(self, run: Callable[[], T]) -> tuple[Replayable, T]:
        """Run it twice, so that whatever compiles or allocates at first use has done so, then record it.

        Returns the graph, and what `run` gave: tensors whose memory later captures reuse once they are unreferenced.
        Raises RuntimeError for a call that cannot be captured, or without memory.
        """
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
            return graph, output


def capture_sizes(most: int) -> tuple[int, ...]:
    """Rising sizes up to `most`, itself the last: 1, 2, 4, then steps of 8 to 64, of 16 to 128, of 32 beyond.

    Above 8 a batch is padded by a third at most, and by less than a fifth from 40 on; a decode step of so few rows
    costs what reading the weights costs, whatever their number.
    """
    assert most >= 1
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most, 32)]
    return (*(size for size in sizes if size < most), most)


def token_sizes(most: int) -> tuple[int, ...]:
    """Rising token counts up to `most`, itself the last: steps of 8 to 64, then four to each doubling, and eight beyond
    256.

    From 32 on a step is padded by a quarter at most, which costs little while reading the weights takes longer than the
    products. Where these bind padding costs time: by an eighth at most there. More sizes would cost more memory and a
    longer start.
    """
    assert most >= 1
    sizes, size = [], 8
    while size < most:
        sizes.append(size)
        size += max(8, (1 << size.bit_length()) // (8 if size < 256 else 16))
    return (*sizes, most)


def padded_size(sizes: tuple[int, ...], size: int) -> int:
    """The smallest of the rising sizes that holds `size` rows, at most the last."""
    assert 1 <= size <= sizes[-1]
    return sizes[bisect_left(sizes, size)]
