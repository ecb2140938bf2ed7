"""Small torch ops take no threads beside the caller's, and the next ones take as many as before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared.engine.runner.device_link import DeviceLink
from shared.kernels.cpu import torch_threads
from shared.kernels.cpu.torch_threads import (
    FEWEST_ELEMENTS,
    MOST_ELEMENTS,
    compute_in_this_thread,
    in_this_thread,
)

pytestmark = pytest.mark.skipif(torch_threads._functions() is None, reason="torch's threads here are not OpenMP's")


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_elements", "within"), [(FEWEST_ELEMENTS, 1), (MOST_ELEMENTS, 1), (MOST_ELEMENTS + 1, 3)])
def test_small_ops_have_one_thread(num_elements: int, within: int) -> None:
    with in_this_thread(torch.empty(0), num_elements):
        assert torch.get_num_threads() == within
    assert torch.get_num_threads() == 3


def test_an_error_within_gives_the_threads_back() -> None:
    with pytest.raises(ZeroDivisionError), in_this_thread(torch.empty(0), FEWEST_ELEMENTS):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_mkl_takes_no_threads_of_its_own() -> None:
    """It asks OpenMP for the number that torch gave it, whatever the calling thread's."""
    mkl_threads = getattr(torch_threads._functions(), "MKL_Get_Max_Threads", None)
    if mkl_threads is None:
        pytest.skip("torch has no MKL here")
    assert mkl_threads() == 3
    with in_this_thread(torch.empty(0), FEWEST_ELEMENTS):
        assert mkl_threads() == 1
        with in_this_thread(torch.empty(0), FEWEST_ELEMENTS):
            pass
        assert mkl_threads() == 1
    assert mkl_threads() == 3


def test_ops_of_another_device_are_left_alone() -> None:
    with in_this_thread(torch.empty(0, device="meta"), FEWEST_ELEMENTS):
        assert torch.get_num_threads() == 3


def openmp_threads() -> int:
    functions = torch_threads._functions()
    assert functions is not None
    return int(functions.omp_get_max_threads())


def test_a_thread_that_torch_has_not_computed_in_gets_the_process_s_number() -> None:
    """Work that calls OpenMP itself, as oneDNN does, runs with the number of threads set there."""

    def small_op_first() -> int:
        with in_this_thread(torch.empty(0), FEWEST_ELEMENTS):
            torch.ones(1 << 20).mul(2)
        return openmp_threads()

    def bound_first() -> int:
        DeviceLink(torch.device("cpu")).bind_thread()
        return openmp_threads()

    for first in (small_op_first, bound_first):
        with ThreadPoolExecutor(1) as fresh:
            assert fresh.submit(first).result(60) == 3


def test_a_thread_that_computes_alone_does_so_from_its_first_op_on() -> None:
    def alone() -> tuple[int, int]:
        compute_in_this_thread()
        torch.ones(1 << 20).mul(2)
        return torch.get_num_threads(), openmp_threads()

    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(alone).result(60) == (1, 1)
    assert torch.get_num_threads() == 3
