"""Prefill attention on a Hopper device, at the settings of the kernel for all devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shared.kernels.attention.bench_batch import attention_inputs
from shared.kernels.attention.prefill.bench import SETTINGS, Setting, num_flops
from shared.kernels.bench_case import Case
from shared.kernels.device import device_limits

MAX_HEAD_DIM = 128


def cases(device: torch.device, settings: Sequence[Setting] = SETTINGS) -> Iterator[Case]:
    """One case a setting that the kernel takes; none on other devices."""
    if device.type == "cuda" and device_limits(device).arch == "sm_90":
        for setting in settings:
            if setting[1].head_dim <= MAX_HEAD_DIM:
                yield _case(setting, device)


def _case(setting: Setting, device: torch.device) -> Case:
    from shared.kernels.attention.hopper.launch import prefill_attention  # needs Gluon

    plan, shape = setting
    query, kv_blocks, batch = attention_inputs(plan, shape, device)
    output = torch.empty_like(query)

    def run() -> None:
        prefill_attention(query, kv_blocks, 0, batch, output, scale=0.1, window=None)

    query_len, kv_len = plan[0]
    label = f"{len(plan)} × {query_len} of {kv_len} tokens, {shape}"
    num_bytes = kv_blocks.nbytes + 2 * query.nbytes
    return Case("prefill attention for hopper", label, run, num_bytes, num_flops(plan, shape))
