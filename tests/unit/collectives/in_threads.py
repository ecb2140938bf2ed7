"""All ranks of a group as threads of one process, over the C++ kernels' shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from shared.collectives.one_host import join, shared_memories
from shared.collectives.rank_links import Backend, RankLinks, Ways
from shared.kernels.backends import cpu as cpu_backend
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load

T = TypeVar("T")
TIMEOUT_S = 120.0
_REFUSAL = cpu_backend.refusal(torch.device("cpu"), torch.float32)
needs_library = pytest.mark.skipif(_REFUSAL is not None, reason=f"no C++ kernels here: {_REFUSAL}")


@contextmanager
def joined(ways: Ways) -> Iterator[list[RankLinks]]:
    """The links of all ranks; each for a thread of its own."""
    library = load(choose()[1])
    descriptors = shared_memories(library, ways)
    with ThreadPoolExecutor(ways.num_ranks) as threads:
        ranks = range(ways.num_ranks)
        links = list(threads.map(lambda rank: join(library, descriptors, rank, ways), ranks, timeout=TIMEOUT_S))
    for descriptor in descriptors:
        os.close(descriptor)
    yield links
    for each in links:
        each.close()


def run_group(tensor: int, pipeline: int, work: Callable[[RankLinks], T], backend: Backend = "shm") -> list[T]:
    """What `work` returns on each rank of tensor x pipeline."""
    library = load(choose()[1])
    ways = Ways(tensor, pipeline, backend)
    descriptors = shared_memories(library, ways)
    ranks: list[Future[T]] = []

    def check() -> None:
        """Raises the error of a rank that has ended by one: another must not wait for it to join."""
        for rank in list(ranks):
            if rank.done():
                rank.result()

    def rank_of(rank: int) -> T:
        links = join(library, descriptors, rank, ways, check)
        try:
            return work(links)
        finally:
            links.close()

    try:
        with ThreadPoolExecutor(tensor * pipeline) as threads:
            ranks += [threads.submit(rank_of, rank) for rank in range(tensor * pipeline)]
            wait(ranks, TIMEOUT_S, FIRST_EXCEPTION)
            check()
            return [rank.result(0) for rank in ranks]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
