"""The kernel benchmark: its arithmetic, and that every case of it still runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loadtest.bench.kernels.measure import GOALS, Case, Limits, all_cases, measure, measure_each
from loadtest.rig.results import Report

from .conftest import Run

LIMITS = Limits("a device", bytes_per_s=4e12, flops_per_s=8e14)


def clock(seconds: float) -> Callable[[Callable[[], object]], float]:
    def of(run: Callable[[], object]) -> float:
        run()
        return seconds

    return of


def test_each_line_is_out_before_the_next_case_and_a_failure_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def break_down() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def third() -> None:
        printed = capsys.readouterr().out
        assert "one, 8: 1.0 µs, 4,000 GB/s, 100% of the limit" in printed
        assert "failed: two, 8\n" in printed
        assert "not permitted when stream is capturing" in printed

    runs = {"one": lambda: None, "two": break_down, "three": third}
    cases = [Case(name, "8", run, num_bytes=4_000_000) for name, run in runs.items()]
    report = Report(None)
    failed = measure_each(cases, LIMITS, clock(1e-6), report)
    assert [result.name for result in report.results] == ["one, 8", "three, 8"]
    assert failed == ["two, 8"]


def run_small_cases() -> list[str]:
    """Every op's benchmark at shapes for the interpreter, in its fp32; returns the ops."""
    from shared.kernels.activation import bench as activation
    from shared.kernels.attention.bench_batch import HeadShape
    from shared.kernels.attention.decode import bench as decode
    from shared.kernels.attention.latent import bench as latent
    from shared.kernels.attention.prefill import bench as prefill
    from shared.kernels.blocks import bench as blocks
    from shared.kernels.coded import bench as coded
    from shared.kernels.experts import bench as experts
    from shared.kernels.rmsnorm import bench as rmsnorm
    from shared.kernels.rotary import bench as rotary
    from shared.kernels.sampling import bench as sampling

    cases_on_a_gpu = {f"{case.op}, {case.shape}" for case in all_cases(torch.device("meta"))}
    assert GOALS.keys() <= cases_on_a_gpu
    device, heads = torch.device("cpu"), HeadShape(2, 1, 16, 16, torch.float32)
    cases = [
        *decode.cases(device, [((20, 5), heads)]),
        *prefill.cases(device, [(((8, 8),), heads), (((4, 9), (2, 2)), heads)]),
        *rmsnorm.cases(device, [(2, 32)]),
        *rotary.cases(device, [2]),
        *activation.cases(device, [(2, 32)]),
        *blocks.cases(device, 3, (2, 8)),
        *sampling.cases(device, [(2, 50)]),
        *list(sampling.tuning_cases(device, [(2, 50)]))[len(sampling.SIZES) : len(sampling.SIZES) + 2],
        *experts.cases(device, [(3, 32, 16, 4, 2)]),
        *experts.tuning_cases(
            device, [(3, 32, 16, 4, 2)], [(9, 32, 16, 4, 2)], (experts.FEW_CONFIGS[:1], experts.MANY_CONFIGS[:1])
        ),
        *latent.cases(device, [((20, 5), 3, 48)]),
        *latent.tuning_cases(device, [((20, 5), 3, 48)]),
        *coded.cases(device, (1, 300), ((128, 64),)),
    ]
    assert next(iter(prefill.tuning_cases(torch.device("meta")))).num_flops == 4 * 32 * 128 * 8192 * 8193 // 2
    for case in cases:
        measure(case, LIMITS, clock(1e-6))
    return [case.op for case in cases]


@pytest.mark.slow
def test_every_case_runs(interpreted: Run) -> None:
    assert set(interpreted(run_small_cases)) == {
        "decode attention", "prefill attention", "torch sdpa", "rms norm", "add + rms norm", "rotate + write",
        "head norm + rotate + write", "silu · mul", "gather blocks", "scatter blocks", "block checksums", "sampling",
        "sampling by sort", "mask", "experts", "attention to latents",
        "coded, 16 bits by cuBLAS", "coded, int4", "coded, int8", "coded, w8a8", "coded, fp8", "coded, fp8 in blocks",
    }  # fmt: skip


def test_attentions_pool_has_every_layer_and_its_blocks_are_shuffled_over_all_of_it() -> None:
    from shared.kernels.attention.bench_batch import NUM_LAYERS, HeadShape, attention_inputs

    shape = HeadShape(2, 1, 16, 16, torch.float32)
    block_bytes = NUM_LAYERS * 2 * 16 * 16 * 4
    memory = torch.zeros(1000 * block_bytes + 5, dtype=torch.uint8)
    _, pool, batch = attention_inputs([(1, 20), (1, 160)], shape, torch.device("cpu"), memory)
    assert pool.rows.shape == (1000, NUM_LAYERS, 2, 1, 16, 16)
    assert pool.memory.data_ptr() == memory.data_ptr()
    used = [int(block) for row, width in zip(batch.block_tables, (2, 10), strict=True) for block in row[:width]]
    assert len(set(used)) == 12
    assert min(used) < 250 < 750 < max(used)
    _, own, _ = attention_inputs([(1, 20)], shape, torch.device("cpu"))
    assert own.rows.shape == (2, NUM_LAYERS, 2, 1, 16, 16)
