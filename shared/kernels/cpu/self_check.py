"""Holds a library's products and attention in bf16 to torch's: `python -m shared.kernels.cpu.self_check LIBRARY`.

Kernels for instructions that few processors have are compiled on every machine and run on few. Before such a library is
used for the first time, it has to pass this in a process of its own, so that neither wrong numbers nor an illegal
instruction reach a worker. Exit status: 0, or another with the reason as the last line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.coded import coded_linear
from shared.kernels.cpu.launch import CpuOps
from shared.kernels.cpu.library import load
from shared.kernels.linear_spec import Kind, LinearSpec
from shared.kernels.opened import OpenedLinear
from shared.kernels.pool_view import PoolView
from shared.kernels.quantized import rounded
from shared.kernels.torch_backend import TorchKernels

ROWS = (1, 8, 40, 130)
"""One row, a few, and enough for each kind of tiling."""
SIZES = ((96, 160, 0), (64, 512, 0), (64, 512, 12))
"""(out_size, in_size, spread) of the products: weights of many powers of two do not fit in 12 bits."""
_KINDS: tuple[tuple[Kind, int], ...] = (("int8", 0), ("int4", 128))
FORMS = (
    *(
        LinearSpec(kind, group, has_zeros=kind == "int4", rounds_input=rounds)
        for kind, group in _KINDS
        for rounds in (False, True)
    ),
    LinearSpec("int4", 32, has_zeros=True, has_lows=True),
)
"""Forms of weights in codes that are checked."""
TOLERANCE = 0.02
"""Largest difference, as a share of the largest expected number: bf16 rounds to 0.4 %."""


def main() -> None:
    """Raises SystemExit with the reason where the library computes something else than torch."""
    torch.manual_seed(0)
    library = load(Path(sys.argv[1]))
    library.tandem_refusal()  # asks for AMX's tiles, for this process
    ops = CpuOps(library)
    for out_size, in_size, spread in SIZES:
        weight = (torch.randn(out_size, in_size) * 2.0 ** torch.randint(-spread, spread + 1, (1, in_size))).bfloat16()
        linear = ops.make_linear(weight.clone(), None, own=True)
        for rows in ROWS:
            x = torch.randn(rows, in_size).bfloat16()
            _compare(f"a product of {rows} rows", linear.forward(x), x.float() @ weight.float().T)
    for spec in FORMS:
        weight = torch.randn(96, 512)
        opened = OpenedLinear(rounded(weight, spec), None, torch.bfloat16)
        coded = coded_linear(lambda: ops.library, rounded(weight, spec), None, torch.bfloat16)
        assert coded is not None, f"{spec} is not read"
        for rows in ROWS:
            x = torch.randn(rows, 512).bfloat16()
            _compare(f"a product of {rows} rows in {spec.kind}", coded.forward(x), opened.forward(x))
    _check_attention(ops)


def _check_attention(ops: CpuOps) -> None:
    """A prompt, a chunk behind cached tokens, and a decode step in one batch."""
    heads, kv_heads, head_dim, block_size = 8, 2, 64, 16
    pool = PoolView.over(torch.randn(16, 1, 2, kv_heads, block_size, head_dim).bfloat16())
    batch = AttentionBatch.from_lists(
        [70, 20, 1], [70, 60, 75], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 8], [9, 10, 11, 12, 13]], block_size
    )
    query = torch.randn(91, heads, head_dim).bfloat16()
    found = ops.paged_attention(query, pool, 0, batch, scale=head_dim**-0.5, window=None)
    expected = TorchKernels.paged_attention(query, pool, 0, batch, scale=head_dim**-0.5, window=None)
    _compare("attention", found, expected)


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).abs().max().item()
    if not error <= TOLERANCE * expected.float().abs().max().item():
        raise SystemExit(f"{what} is off by {error:.3g}")


if __name__ == "__main__":
    main()
