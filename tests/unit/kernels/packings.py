"""The layouts of bf16 weights that the CPU kernels choose by the processor's features, each forced on any processor.

`panels`: AVX-512 alone: tight panels, or plain ones where the library was compiled for AVX512-BF16.
`plain`:  AVX512-BF16: plain panels.
`onednn`: AMX: oneDNN packs and multiplies, and no stack runs a decoder's layers in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shared.kernels import cpu_backend
from shared.kernels.cpu.launch import load

PACKINGS = ("panels", "plain", "onednn")
REFUSAL = cpu_backend.refusal(torch.device("cpu"), torch.float32)
needs_library = pytest.mark.skipif(REFUSAL is not None, reason=f"no C++ kernels here: {REFUSAL}")


@contextmanager
def forced(packing: str) -> Iterator[None]:
    """Kernels that are made meanwhile lay weights out as `packing` says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: packing == "onednn")
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: packing != "panels")
        if packing == "plain":
            patch.setattr(cpu_backend, "load", _load_without_tight_panels)
        yield


def _load_without_tight_panels(path: Path) -> ctypes.CDLL:
    library = load(path)
    library.tandem_reads_tight = lambda: 0
    return library
