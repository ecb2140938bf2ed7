"""Where Triton's functions run in these tests: interpreted in one child process, compiled in another.

Triton decides at its first import which of the two it is, so neither may happen in the process of the tests.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Calls a module's function in a process whose Triton interprets; errors come back as they were raised."""
    yield from _child(_interpret)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Calls a module's function in a process whose Triton compiles, into a cache of its own."""
    yield from _child(partial(_compile, str(tmp_path_factory.mktemp("triton"))))


@pytest.fixture
def compiled_afresh(tmp_path: Path) -> Iterator[Run]:
    """Likewise, in a process that has compiled nothing yet."""
    yield from _child(partial(_compile, str(tmp_path)))


def _child(initializer: Callable[[], None]) -> Iterator[Run]:
    """No call has a deadline of its own: the test's limit ends the wait."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    _sum_in_order()


def _sum_in_order() -> None:
    """`tl.dot` adds each element's products one after another, as every row of a tile on a GPU has one order: NumPy's
    library may add a tile's last rows in another order than its first, which depends on the processor."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        a, b = a.astype(dtype), b.astype(dtype)
        total = np.zeros(np.broadcast_shapes((*a.shape[:-1], 1), (*b.shape[:-2], 1, b.shape[-1])), dtype)
        for k in range(a.shape[-1]):
            total += a[..., :, k : k + 1] * b[..., k : k + 1, :]
        return total

    def create_dot(*args: Any) -> Any:
        with patch.object(np, "matmul", matmul):
            return plain(*args)

    InterpreterBuilder.create_dot = create_dot


def _compile(cache_folder: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache_folder
