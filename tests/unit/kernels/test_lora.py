"""Low-rank additions by every backend: the reference's numbers, and bits that batch mates do not change."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.backends.cpu import CpuKernels, DeterministicCpuKernels
from shared.kernels.torch_backend import TorchKernels

from . import lora_checks
from .conftest import Run
from .isas import every_isa, needs_library


def test_rows_are_sorted_by_addition_and_cut_into_tiles_of_one_addition() -> None:
    order, starts, tiles = lora_checks.rows_of([1, -1, 0, 1, 1, -1, 3], 4)
    assert order.tolist() == [2, 0, 3, 4, 6]
    assert starts == (0, 1, 4, 4, 5)
    assert tiles == [(0, 0, 1), (1, 1, 3), (1, 3, 4), (3, 4, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_library
@every_isa
@pytest.mark.parametrize(("num_rows", "in_size"), [(1, 512), (3, 48), (19, 1056), (70, 2048)])
def test_the_cpu_kernels_add_what_the_reference_adds(isa: str, dtype: torch.dtype, num_rows: int, in_size: int) -> None:
    lora_checks.check_loras(CpuKernels(isa), num_rows, in_size, dtype)
    lora_checks.check_loras(DeterministicCpuKernels(isa), num_rows, in_size, dtype, exact=True)


@needs_library
def test_sizes_of_no_whole_vectors_are_left_to_torch() -> None:
    lora_checks.check_loras(CpuKernels(), 9, 41, torch.float32)


@needs_library
def test_adapters_to_parts_of_whole_vectors_and_of_others_share_a_step() -> None:
    """As to queries, and to keys too, of a projection whose keys are few."""
    x, rows = torch.randn(4, 64), lora_checks.LoraRows.of([0, 1, -1, 0], 2)
    parts = [
        lora_checks.parts_of(seed, ranks, 64, torch.float32, "cpu", spans=((0, 32), (32, 8)))
        for seed, ranks in enumerate([(4, 0), (4, 4)])
    ]
    found, expected = torch.zeros(4, 40), torch.zeros(4, 40)
    for kernels, out in ((CpuKernels(), found), (TorchKernels(), expected)):
        kernels.add_lora(out, x, [kernels.make_lora(each, 64, x) for each in parts], rows)
    torch.testing.assert_close(found, expected)
    assert found.any(dim=1).tolist() == [True, True, False, True]


@needs_library
def test_a_step_without_such_rows_changes_nothing() -> None:
    for kernels in (CpuKernels(), TorchKernels()):
        out = torch.ones(3, 128)
        x = torch.ones(3, 64)
        made = kernels.make_lora(lora_checks.parts_of(0, (4, 4, 4), 64, torch.float32, "cpu"), 64, x)
        kernels.add_lora(out, x, [made], lora_checks.LoraRows.of([-1, -1, -1], 1))
        assert torch.equal(out, torch.ones(3, 128))


@pytest.mark.parametrize(
    ("num_rows", "in_size", "dtype"),
    [
        (1, 64, torch.float32),
        (23, 200, torch.float16),
        pytest.param(1, 64, torch.float16, marks=pytest.mark.slow),
        pytest.param(23, 200, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_triton_adds_what_the_reference_adds(interpreted: Run, dtype: torch.dtype, num_rows: int, in_size: int) -> None:
    interpreted(lora_checks.check_triton_loras, num_rows, in_size, dtype)


def test_slots_that_graphs_read_add_what_the_same_rows_get_otherwise(interpreted: Run) -> None:
    interpreted(lora_checks.check_slots, torch.float32)
