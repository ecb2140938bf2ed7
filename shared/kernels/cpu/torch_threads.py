"""Keeps small torch ops beside the C++ kernels in the calling thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FEWEST_ELEMENTS, MOST_ELEMENTS = 1 << 7, 1 << 21
"""Below the first torch takes no thread in any case: MKL's cosine does from 128 elements on, torch's own loops from
some thousands. The second is what a thread copies in about half a millisecond."""


@contextmanager
def in_this_thread(x: Tensor, num_elements: int) -> Iterator[None]:
    """Torch's ops within take no further threads, where `x` is on a CPU and they compute few elements.

    Torch shares out loops from some thousands of elements on, and waits at OpenMP's barrier until every thread has
    come. These sleep while the C++ kernels' own threads work: on cores that others use too, each barrier lasts as long
    as another's slice of time, some milliseconds for microseconds of work. Once through it they look for more work
    for some milliseconds, on the cores that the C++ kernels compute on next. Holds for the calling thread alone; the
    C++ kernels ask it for their number of threads, so none may be called within.
    """
    is_small = FEWEST_ELEMENTS <= num_elements <= MOST_ELEMENTS
    functions = _functions() if is_small and x.device.type == "cpu" else None
    if functions is None:
        yield
        return
    # Not OpenMP's own number: a thread that torch has not computed in yet does not know what was set for all.
    number = torch.get_num_threads()
    mkl = _set_mkl_threads()
    mkl_number = mkl(1)
    try:
        functions.omp_set_num_threads(1)
        yield
    finally:
        functions.omp_set_num_threads(number)
        mkl(mkl_number)


@functools.cache
def _functions() -> Any | None:
    """Functions of the OpenMP that torch is linked with; None where torch has another kind of threads."""
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "omp_set_num_threads") else None


@functools.cache
def _set_mkl_threads() -> Callable[[int], int]:
    """Sets the calling thread's number of threads in MKL, which uses OpenMP, and returns the one before; 0 is
    the process's. Does nothing where torch has no MKL."""
    function = getattr(_functions(), "MKL_Set_Num_Threads_Local", None)
    return function or (lambda _: 0)


def compute_in_this_thread() -> None:
    """The calling thread's torch ops take no further threads from now on, however much they compute."""
    functions = _functions()
    if functions is not None:
        torch.get_num_threads()  # the first call in a thread sets OpenMP's number to the process's
        functions.omp_set_num_threads(1)
        _set_mkl_threads()(1)
