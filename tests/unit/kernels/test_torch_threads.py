"""Small torch ops take no threads beside the caller's, and the next ones take as many as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shared.kernels.cpu import torch_threads
from shared.kernels.cpu.torch_threads import FEWEST_ELEMENTS, MOST_ELEMENTS, in_this_thread

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


def test_ops_of_another_device_are_left_alone() -> None:
    with in_this_thread(torch.empty(0, device="meta"), FEWEST_ELEMENTS):
        assert torch.get_num_threads() == 3
