"""FlashInfer's attention at the shapes of our own benchmarks, over the same paged pool. Needs the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shared.kernels.attention.bench_batch import HeadShape, attention_inputs
from shared.kernels.attention.decode import bench as decode
from shared.kernels.attention.flashinfer import attend
from shared.kernels.attention.flashinfer.wrappers import Wrappers
from shared.kernels.attention.prefill import bench as prefill
from shared.kernels.bench_case import Case


def cases(
    device: torch.device,
    decodes: Sequence[decode.Setting] = decode.SETTINGS,
    prefills: Sequence[prefill.Setting] = prefill.SETTINGS,
) -> Iterator[Case]:
    """Each shape twice: our kernels, then FlashInfer's. Planning is left out of the times of both."""
    import flashinfer  # type: ignore[import-untyped, import-not-found, unused-ignore]

    wrappers = Wrappers(flashinfer)
    for kv_lens, shape in decodes:
        for case in decode.cases(device, [(kv_lens, shape)]):
            yield case
            yield _case(case, [(1, kv_len) for kv_len in kv_lens], shape, device, wrappers)
    for plan, shape in prefills:
        for case in prefill.cases(device, [(plan, shape)]):
            yield case
            if case.op == "prefill attention":
                yield _case(case, plan, shape, device, wrappers)


def _case(
    ours: Case, plan: Sequence[tuple[int, int]], shape: HeadShape, device: torch.device, wrappers: Wrappers
) -> Case:
    query, kv_blocks, batch = attention_inputs(plan, shape, device)

    def run() -> None:
        attend.paged_attention(wrappers, query, kv_blocks, 0, batch, scale=0.1, window=None)

    return Case(f"{ours.op} by flashinfer", ours.shape, run, ours.num_bytes, ours.num_flops)
