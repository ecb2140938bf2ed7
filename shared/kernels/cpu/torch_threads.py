"""Small torch ops beside the C++ kernels: in the calling thread alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FEWEST_ELEMENTS, MOST_ELEMENTS = 1 << 12, 1 << 21
"""Below the first torch takes no thread in any case; the second is what a thread copies in about half a millisecond."""


@contextmanager
def in_this_thread(x: Tensor, num_elements: int) -> Iterator[None]:
    """Torch's ops within take no further threads, where `x` is on a CPU and they compute few elements.

    Torch shares out loops from some thousands of elements on, and waits at OpenMP's barrier until every thread has
    come. These sleep while the C++ kernels' own threads work: on cores that others use too, each barrier lasts as long
    as another's slice of time, some milliseconds for microseconds of work. Holds for the calling thread alone; the
    C++ kernels ask it for their number of threads, so none may be called within.
    """
    is_small = FEWEST_ELEMENTS <= num_elements <= MOST_ELEMENTS
    functions = _functions() if is_small and x.device.type == "cpu" else None
    if functions is None:
        yield
        return
    # Not OpenMP's own number: a thread that torch has not computed in yet does not know what was set for all.
    number = torch.get_num_threads()
    functions.omp_set_num_threads(1)
    try:
        yield
    finally:
        functions.omp_set_num_threads(number)


@functools.cache
def _functions() -> Any | None:
    """Of the OpenMP that torch is linked with; None where it has another kind of threads."""
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None
