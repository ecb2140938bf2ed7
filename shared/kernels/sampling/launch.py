"""Launcher of Triton's sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.sampling.jit import sample_rows
from shared.kernels.sampling.reference import check_sample_tokens, probabilities
from shared.kernels.sampling.rows import SamplingRows

WAYS = 4  # parts that a pass of the search cuts the range of probabilities into
TILE = 2048  # tokens of a step


def sample_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """`SamplingOps.sample_tokens`.

    The probabilities are torch's softmax, the same that the reference sorts, so on one device both choose the
    same token unless the random point falls within fp64 rounding (about 1e-15 of the mass) of a boundary.
    """
    check_sample_tokens(logits, rows)
    tokens = torch.empty(rows.num_rows, dtype=torch.int64, device=logits.device)
    if rows.num_rows:
        sample_rows[(rows.num_rows,)](
            logits,
            probabilities(logits, rows),
            rows.temperatures,
            rows.top_ks,
            rows.top_ps,
            rows.min_ps,
            rows.seeds,
            rows.positions,
            tokens,
            logits.shape[1],
            WAYS=WAYS,
            TILE=TILE,
            num_warps=16,
            enable_fp_fusion=False,
        )
    return tokens
