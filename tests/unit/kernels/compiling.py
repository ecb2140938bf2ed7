"""Triton's functions compiled for a GPU that is not there: the launchers run up to where a kernel would start."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from shared.kernels.activation.activations import GELU, SILU, Activation
from shared.kernels.batch import AttentionBatch
from shared.kernels.delta_sizes import PartPlaces
from shared.kernels.pool_view import KV_DTYPES
from shared.kernels.sampling.history import Penalties, TokenHistory
from shared.kernels.sampling.rows import SamplingRows

from .attention_case import pool_of_nan
from .coded_checks import FORMS, random_weight
from .comparing import triton_kernels
from .delta_checks import DeltaCase
from .routing_case import FAMILIES


@dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    arch: str  # as `shared.kernels.device.DeviceLimits` names it
    shared_bytes: int  # what a program may take there

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")


TARGETS = {
    target.arch: target
    for target in (
        Target("sm_80", 163 * 1024),
        Target("sm_86", 99 * 1024),
        Target("sm_89", 99 * 1024),
        Target("sm_90", 227 * 1024),
        Target("sm_100", 227 * 1024),
        Target("sm_120", 99 * 1024),
        Target("gfx942", 64 * 1024),
    )
}
"""Shared memory by NVIDIA's programming guide (compute capabilities) and AMD's CDNA3 manual (LDS)."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as it would run on its target."""

    name: str
    registers: int
    stack_bytes: int  # spilled registers
    shared_bytes: int
    code: str  # PTX, or AMD's assembly
    spilled_registers: int = 0  # as AMD's compiler counts them; NVIDIA's puts them on the stack

    @property
    def spills(self) -> bool:
        return self.stack_bytes > 0 or self.spilled_registers > 0

    @property
    def num_matrix_instructions(self) -> int:
        return sum(self.code.count(name) for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma"))

    @property
    def num_async_copies(self) -> int:
        """Of 16 bytes, from global to shared memory."""
        return self.code.count("cp.async.cg")


class _AbsentDevice:
    """What the launch path asks a driver before it has compiled."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self._target.is_amd:
            return GPUTarget("hip", self._target.arch, 64)
        return GPUTarget("cuda", int(self._target.arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        return self._target.arch  # the key of Triton's cache of a device's kernels

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _absent(target: Target) -> Iterator[None]:
    """The launchers take `target` for the device that they launch on."""
    from triton.runtime.driver import driver

    from shared.kernels import device

    kept = device.device_limits
    driver.set_active(_AbsentDevice(target))
    limits = device.DeviceLimits(target.arch, target.shared_bytes, num_multiprocessors=132)
    device.device_limits = lambda _device: limits
    try:
        yield
    finally:
        device.device_limits = kept


def collect(calls: Callable[[], object], target: Target) -> list[Compiled]:
    """Runs `calls` with every launch stopped after its compilation."""
    from triton.runtime.jit import JITFunction

    found: dict[int, Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[id(kernel)] = (_inspect_amd if target.is_amd else _inspect)(self.fn.__name__, kernel)
        return kernel

    JITFunction.run = compile_only
    try:
        with _absent(target):
            calls()
    finally:
        JITFunction.run = run
    return list(found.values())


def count_specialisations(calls: Callable[[], object]) -> dict[str, int]:
    """How many different kernels each Triton function would be compiled to by `calls`; compiles none."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    keys: dict[str, set[str]] = {}
    run = JITFunction.run

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        keys.setdefault(fn.jit_function.fn.__name__, set()).add(str(key))
        return True  # as if it had been compiled elsewhere

    def look_up_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    kept, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    JITFunction.run = look_up_only
    try:
        with _absent(TARGETS["sm_90"]):
            calls()
    finally:
        knobs.runtime.jit_cache_hook = kept
        JITFunction.run = run
    return {name: len(found) for name, found in keys.items()}


def _inspect(name: str, kernel: Any) -> Compiled:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return Compiled(name, int(match[1]), int(match[2]), kernel.metadata.shared, kernel.asm["ptx"])


def _inspect_amd(name: str, kernel: Any) -> Compiled:
    code = kernel.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s+(\d+)", code)
    stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", code)
    assert registers is not None
    assert stack is not None
    spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", code)
    assert spilled is not None
    return Compiled(
        name, int(registers[1]), int(stack[1]), kernel.metadata.shared, code, spilled_registers=int(spilled[1])
    )


def compile_attention(
    head_dim: int,
    group: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    arch: str = "sm_90",
    softcap: float | None = None,
    has_sinks: bool = False,
    is_chunked: bool = False,
    queries: int = 1,
) -> list[Compiled]:
    """Decode attention with its merge, then prefill attention with long chunks and with short ones; or alone that of
    steps with guesses, by as many tokens of a sequence as `queries`."""

    def calls() -> None:
        for plan in ([(1, 4096)] * 4, [(600, 4096)], [(3, 4096)]) if queries == 1 else ([(queries, 4096)] * 4,):
            query_lens, kv_lens = zip(*plan, strict=True)
            tables = [list(range(-(-kv_len // block_size))) for kv_len in kv_lens]
            batch = replace(AttentionBatch.from_lists(query_lens, kv_lens, tables, block_size), has_guesses=queries > 1)
            query = torch.zeros(sum(query_lens), 2 * group, head_dim, dtype=dtype)
            pool = pool_of_nan((1, 2, 2, 2, block_size, head_dim), kv_dtype or dtype)
            sinks = torch.zeros(2 * group) if has_sinks else None
            triton_kernels().paged_attention(
                query, pool, 1, batch, scale=0.1, window=window, softcap=softcap, sinks=sinks, is_chunked=is_chunked
            )

    return collect(calls, TARGETS[arch])


def compile_latents(num_heads: int, dtype: torch.dtype, arch: str = "sm_90") -> list[Compiled]:
    """Decode attention to rows of DeepSeek's latents."""

    def calls() -> None:
        batch = AttentionBatch.from_lists([1] * 4, [4096] * 4, [list(range(256))] * 4, 16)
        query, pool = torch.zeros(4, num_heads, 576, dtype=dtype), pool_of_nan((1, 2, 1, 1, 16, 576), dtype)
        triton_kernels().paged_attention(query, pool, 1, batch, scale=0.1, window=None)

    return collect(calls, TARGETS[arch])


def compile_experts(dtype: torch.dtype, arch: str = "sm_90") -> list[Compiled]:
    """All tilings of the grouped products, at the sizes of Qwen3-30B-A3B."""

    def calls() -> None:
        gate_up, down = torch.zeros(128, 2 * 768, 2048, dtype=dtype), torch.zeros(128, 2048, 768, dtype=dtype)
        experts = triton_kernels().make_experts(gate_up, down, 0, own=False)
        for num_tokens in (8, 512, 2048):
            ids = torch.arange(8).expand(num_tokens, 8).contiguous()
            experts.forward(torch.zeros(num_tokens, 2048, dtype=dtype), ids, torch.zeros(num_tokens, 8))

    return collect(calls, TARGETS[arch])


def compile_single_heads(dtype: torch.dtype, arch: str = "sm_90") -> list[Compiled]:
    """What a rank with one KV head launches: the compiler takes an argument of 1 for a constant."""

    def calls() -> None:
        kernels = triton_kernels()
        key, angles = torch.zeros(8, 1, 128, dtype=dtype), torch.zeros(8, 128, dtype=dtype)
        for num_heads, kv_dtype in product((1, 4), KV_DTYPES[dtype]):
            query, pool = torch.zeros(8, num_heads, 128, dtype=dtype), pool_of_nan((2, 2, 2, 1, 16, 128), kv_dtype)
            kernels.rotate_and_write(
                query, key, key, angles, angles, pool, 1, torch.arange(8), q_norm=None, k_norm=None, eps=1e-6
            )
            for query_lens in ([1] * 8, [8]):
                batch = AttentionBatch.from_lists(query_lens, [8] * len(query_lens), [[0]] * len(query_lens), 16)
                kernels.paged_attention(query, pool, 1, batch, scale=0.1, window=None)

    return collect(calls, TARGETS[arch])


def compile_the_rest(dtype: torch.dtype, arch: str = "sm_90") -> list[Compiled]:
    """Every other kernel, at the sizes of an 8B model."""

    def calls() -> None:
        kernels = triton_kernels()
        x, weight = torch.zeros(64, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        for is_centered in (False, True):
            kernels.rms_norm(x, weight, 1e-5, is_centered=is_centered)
            kernels.add_rms_norm(x, x, weight, 1e-5, is_centered=is_centered)
        for num_rows, out_size in ((1, 4096), (32, 4096), (64, 132 * 128)):
            linear = kernels.make_linear(torch.zeros(out_size, 512, dtype=dtype), None, own=False)
            linear.forward(torch.zeros(num_rows, 512, dtype=dtype))
        for activation in (SILU, GELU, Activation("clamped", alpha=1.702, limit=7.0)):
            kernels.act_and_mul(torch.zeros(64, 28672, dtype=dtype), activation)
        query, key = torch.zeros(8, 32, 128, dtype=dtype), torch.zeros(8, 8, 128, dtype=dtype)
        angles, slots = torch.zeros(8, 128, dtype=dtype), torch.arange(8)
        pool = torch.zeros(2, 2, 2, 8, 16, 128, dtype=dtype)
        kept = [pool_of_nan(tuple(pool.shape), kv_dtype) for kv_dtype in KV_DTYPES[dtype]]
        for norm, view in product((None, torch.zeros(128, dtype=dtype)), kept):
            kernels.rotate_and_write(
                query, key, key, angles, angles, view, 1, slots, q_norm=norm, k_norm=norm, eps=1e-6
            )
        heads, latent = torch.zeros(8, 128, 192, dtype=dtype), torch.zeros(8, 576, dtype=dtype)
        for is_interleaved, kv_dtype in product((True, False), {dtype, torch.bfloat16} & {*KV_DTYPES[dtype]}):
            kernels.rotate_and_write_latent(
                heads, latent, angles[:, :64].contiguous(), angles[:, :64].contiguous(),
                pool_of_nan((2, 2, 1, 1, 16, 576), kv_dtype), 1, slots, norm=torch.zeros(512, dtype=dtype), eps=1e-6,
                is_interleaved=is_interleaved,
            )  # fmt: skip
        for routing in (FAMILIES["qwen3-moe"], FAMILIES["deepseek-v3"]):
            bias = torch.zeros(routing.num_experts) if routing.has_bias else None
            kernels.choose_experts(torch.zeros(8, routing.num_experts, dtype=dtype), bias, routing)
        ids = torch.tensor([0, 1])
        kernels.scatter_blocks(kernels.gather_blocks(pool, ids), pool, ids)
        kernels.block_checksums(pool, ids)
        kernels.block_key_sums(pool, ids, torch.zeros(pool[:1].nbytes // 8, dtype=torch.int64))
        rows = SamplingRows.from_lists([1.0], [0], [1.0], [0.0], [1], [2])
        kernels.sample_tokens(torch.zeros(1, 128_256), rows)
        kernels.mask_tokens(torch.zeros(1, 128_256), torch.zeros(1, 4008, dtype=torch.int32), torch.tensor([0]))
        history, slot, factor = TokenHistory.empty(2, 128_256, "cpu"), torch.tensor([0]), torch.ones(1)
        kernels.penalize(torch.zeros(1, 128_256), history, Penalties(slot, factor, factor, factor))
        kernels.count_tokens(history, slot, slot)

    return collect(calls, TARGETS[arch])


def compile_coded(form: str, dtype: torch.dtype, arch: str = "sm_90") -> list[Compiled]:
    """Products with a weight in codes for every number of rows, and its opening."""
    from shared.kernels.coded import launch

    def calls() -> None:
        weight = random_weight(FORMS[form], 512, 2048, "cpu")
        linear = triton_kernels().make_quantized_linear(weight, torch.zeros(512, dtype=dtype), dtype)
        assert isinstance(linear, launch.CodedLinear)
        for num_rows in (1, 16, 32, 64, 128, 256):
            linear.forward(torch.zeros(num_rows, 2048, dtype=dtype))
        if linear.weight.kind != "whole":
            launch.open_weight(linear.weight, 0, 512, dtype)

    return collect(calls, TARGETS[arch])


def compile_delta(dtype: torch.dtype, arch: str = "sm_90", *, by_channel: bool = False) -> list[Compiled]:
    """A layer of Qwen3-Next 80B, or `by_channel` of Kimi Linear 48B, with blocks of 16 tokens: answers beside
    prompts."""
    blocks = {"words": 98_304, "block_size": 16, "parts": 2, "runs": 24}
    sizes = {"heads": (16, 32), "dims": (128, 128), **blocks, "number": 0}
    if by_channel:
        whole = PartPlaces(0, 8, 8)
        blocks = {"words": 32_256, "block_size": 16, "parts": 8, "runs": 7, "places": whole}
        sizes = {"heads": (32, 32), "dims": (128, 128), **blocks, "number": 0, "by_channel": True}

    def calls() -> None:
        DeltaCase([(1, 8), (70, 75)], dtype=dtype, **sizes).run(triton_kernels())  # type: ignore[arg-type]

    return collect(calls, TARGETS[arch])
