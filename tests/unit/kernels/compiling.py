"""Triton's functions compiled for a GPU that is not there: the launchers run up to where a kernel would start."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.kernels.batch import AttentionBatch
from shared.kernels.sampling.rows import SamplingRows

from .checks import triton_kernels

SHARED_MEMORY_BYTES = 227 * 1024  # what a program may take on compute capability 9.0


@dataclass(frozen=True)
class Compiled:
    """One kernel as it would run on compute capability 9.0."""

    name: str
    registers: int
    stack_bytes: int  # spilled registers
    shared_bytes: int
    num_matrix_instructions: int
    num_wide_matrix_instructions: int  # those of a whole warp group
    num_async_copies: int  # of 16 bytes, from global to shared memory


class _AbsentDevice:
    """What the launch path asks a driver before it has compiled."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _collect(calls: Any) -> list[Compiled]:
    """Runs `calls` with every launch stopped after its compilation."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: dict[int, Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[id(kernel)] = _inspect(self.fn.__name__, kernel)
        return kernel

    driver.set_active(_AbsentDevice())
    JITFunction.run = compile_only
    try:
        calls()
    finally:
        JITFunction.run = run
    return list(found.values())


def _inspect(name: str, kernel: Any) -> Compiled:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    code = kernel.asm["ptx"]
    return Compiled(
        name, int(match[1]), int(match[2]), kernel.metadata.shared,
        code.count("mma.sync"), code.count("wgmma.mma_async"), code.count("cp.async.cg"),
    )  # fmt: skip


def compile_attention(
    head_dim: int,
    group: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> list[Compiled]:
    """Decode attention with its merge, then prefill attention with long chunks and with short ones."""

    def calls() -> None:
        for plan in ([(1, 4096)] * 4, [(600, 4096)], [(3, 4096)]):
            query_lens, kv_lens = zip(*plan, strict=True)
            tables = [list(range(-(-kv_len // block_size))) for kv_len in kv_lens]
            batch = AttentionBatch.from_lists(query_lens, kv_lens, tables, block_size)
            query = torch.zeros(sum(query_lens), 2 * group, head_dim, dtype=dtype)
            kv_blocks = torch.zeros(1, 2, 2, 2, block_size, head_dim, dtype=kv_dtype or dtype)
            triton_kernels().paged_attention(query, kv_blocks, 1, batch, scale=0.1, window=window)

    return _collect(calls)


def compile_the_rest(dtype: torch.dtype) -> list[Compiled]:
    """Every other kernel, at the sizes of an 8B model."""

    def calls() -> None:
        kernels = triton_kernels()
        x, weight = torch.zeros(64, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        kernels.rms_norm(x, weight, 1e-5)
        kernels.add_rms_norm(x, x, weight, 1e-5)
        kernels.silu_mul(torch.zeros(64, 28672, dtype=dtype))
        query, key = torch.zeros(8, 32, 128, dtype=dtype), torch.zeros(8, 8, 128, dtype=dtype)
        angles, slots = torch.zeros(8, 128, dtype=dtype), torch.arange(8)
        pool = torch.zeros(2, 2, 2, 8, 16, 128, dtype=dtype)
        for norm in (None, torch.zeros(128, dtype=dtype)):
            kernels.rotate_and_write(
                query, key, key, angles, angles, pool, 1, slots, q_norm=norm, k_norm=norm, eps=1e-6
            )
        ids = torch.tensor([0, 1])
        kernels.scatter_blocks(kernels.gather_blocks(pool, ids), pool, ids)
        kernels.block_checksums(pool, ids)
        rows = SamplingRows.from_lists([1.0], [0], [1.0], [0.0], [1], [2])
        kernels.sample_tokens(torch.zeros(1, 128_256), rows)

    return _collect(calls)
