"""Groups whose ranks are threads of the test's process: what they compute does not depend on that."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch import distributed

from shared.collectives.cpu_group import SINGLE_BYTES, SLOT_BYTES, CpuGroup, group_bytes, shared_memory
from shared.collectives.distributed import DistributedGroup
from shared.collectives.interface import Collectives
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load

T = TypeVar("T")
RunRanks = Callable[[int, Callable[[Collectives], T]], list[T]]

TIMEOUT_S = 60.0


@pytest.fixture(params=["shared memory", "shared memory, in shares", "gloo"])
def run_ranks(request: pytest.FixtureRequest, tmp_path: Path) -> RunRanks[Any]:
    """`run_ranks(size, work)`: what `work(group)` returns on each rank."""
    library = load(choose()[1])
    stores = itertools.count()
    single_bytes = SINGLE_BYTES if request.param.endswith("shares") else SLOT_BYTES

    @contextmanager
    def joined(rank: int, size: int, descriptor: int, store: Path) -> Iterator[Collectives]:
        if request.param == "gloo":
            with closing(DistributedGroup(rank, size, distributed.FileStore(str(store), size))) as gloo:
                yield gloo
            return
        with closing(CpuGroup(library, descriptor, rank, size, single_bytes=single_bytes)) as group:
            group.meet()
            yield group

    def run(size: int, work: Callable[[Collectives], T]) -> list[T]:
        descriptor = shared_memory(group_bytes(library, size))
        # One for each group: the file of the one before goes with its last reader, which may be later than its end.
        store = tmp_path / f"store {next(stores)}"

        def rank_of(rank: int) -> T:
            with joined(rank, size, descriptor, store) as group:
                return work(group)

        try:
            with ThreadPoolExecutor(size) as threads:
                return list(threads.map(rank_of, range(size), timeout=TIMEOUT_S))
        finally:
            os.close(descriptor)

    return run
