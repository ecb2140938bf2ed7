"""The C++ kernels between the products against their torch references, with every instruction set."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared.kernels.activation.activations import GELU, SILU, Activation
from shared.kernels.backends import cpu as cpu_backend
from shared.kernels.cpu.library import num_threads_function
from shared.kernels.delta_sizes import PartPlaces
from shared.kernels.pool_view import PoolView
from shared.kernels.torch_backend import TorchKernels

from .attention_case import LAYER, AttentionCase
from .cpu_case import DTYPES, close, random
from .delta_checks import CHUNKS, ONES, DeltaCase, check_delta
from .isas import EACH_ISA, needs_library
from .sampling_checks import check_likeliest, check_masks, check_penalties

REFERENCE = TorchKernels()
BESIDE = PartPlaces(2, 2, 4)  # parts of states in the middle of a KV head


@pytest.fixture(scope="module", params=EACH_ISA)
def cpu(request: pytest.FixtureRequest) -> cpu_backend.CpuKernels:
    return cpu_backend.CpuKernels(request.param)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 256), (40, 688), (3, 24)])
def test_norms_and_silu(cpu, dtype, rows, size):
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    for centered in ({}, {"is_centered": True}):
        close(cpu.rms_norm(x + 1, weight, 1e-5, **centered), REFERENCE.rms_norm(x + 1, weight, 1e-5, **centered))
        for found, expected in zip(
            cpu.add_rms_norm(x, residual, weight, 1e-5, **centered),
            REFERENCE.add_rms_norm(x, residual, weight, 1e-5, **centered),
            strict=True,
        ):
            close(found, expected)
    gate_up = 8 * random(rows, 2 * size, dtype=dtype, seed=3)
    for activation in (SILU, GELU, Activation("clamped", alpha=1.702, limit=3.0)):
        close(cpu.act_and_mul(gate_up, activation), REFERENCE.act_and_mul(gate_up, activation))


@needs_library
def test_silu_at_the_ends_of_its_range(cpu):
    gate = torch.tensor([-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 1e30] * 4)
    gate_up = torch.cat((gate, torch.ones(32)))[None]
    torch.testing.assert_close(cpu.act_and_mul(gate_up), REFERENCE.act_and_mul(gate_up), rtol=1e-5, atol=1e-30)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((6, 1), 128), ((3, 3), 32), ((4, 2), 80)])
def test_rotate_and_write(cpu, dtype, norms, heads, head_dim):
    num_heads, num_kv_heads = heads
    tokens, width = 11, (num_heads + 2 * num_kv_heads) * head_dim
    qkv = random(tokens, width, dtype=dtype)
    parts = torch.split(qkv, [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=-1)
    query, key, value = (part.view(tokens, -1, head_dim) for part in parts)
    angles = random(tokens, head_dim // 2, dtype=torch.float32, seed=1)
    cos, sin = (f(torch.cat((angles, angles), dim=-1)).to(dtype) for f in (torch.cos, torch.sin))
    norm = {"q_norm": random(head_dim, dtype=dtype), "k_norm": random(head_dim, dtype=dtype, seed=3)}
    norm = {name: weight if norms else None for name, weight in norm.items()}
    slots = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(4))[:tokens]
    pools = [torch.zeros(5, 2, 2, num_kv_heads, 16, head_dim, dtype=dtype) for _ in range(2)]
    placed = [
        kernels.rotate_and_write(query, key, value, cos, sin, PoolView.over(pool), 1, slots, **norm, eps=1e-5)
        for kernels, pool in zip((cpu, REFERENCE), pools, strict=True)
    ]
    close(*placed)
    close(*pools)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"words": 500},
        {"heads": (1, 3), "words": 77, "kernel_size": 2, "number": 0},
        {"heads": (2, 2), "dims": (64, 128), "words": 1 << 15},
        {"dims": (16, 144), "words": 2304, "kernel_size": 1},
        {"heads": (2, 4), "dims": (16, 32), "words": 768, "parts": 2, "runs": 3},  # whole rows in each run
        {"heads": (6, 6), "dims": (16, 48), "words": 930, "parts": 3, "runs": 5, "kernel_size": 3},
        {"dims": (8, 12)},  # left to torch
        {"heads": (2, 2), "dims": (32, 32), "words": 500, "by_channel": True},
        {"heads": (3, 3), "dims": (80, 80), "words": 7001, "by_channel": True, "kernel_size": 3},
        {"heads": (2, 2), "dims": (16, 16), "words": 768, "runs": 3, "parts": 2, "places": BESIDE, "by_channel": True},
        {"heads": (2, 2), "dims": (8, 12), "by_channel": True},  # left to torch
    ],
    ids=str,
)
def test_the_gated_delta_rule_equals_the_reference(cpu, dtype, sizes):
    for plan in (ONES, CHUNKS, ONES + CHUNKS):
        check_delta(cpu, DeltaCase(plan, dtype=dtype, **{"dims": (32, 48), **sizes}))


@needs_library
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("plan", [ONES, CHUNKS])
def test_the_gated_delta_rule_hides_no_nan(cpu, plan, by_channel):
    for place in ("query", "value", "gate", "rate", "decay"):
        case = DeltaCase(plan, heads=(2, 2), dims=(16, 32), words=500, by_channel=by_channel)
        layer = case.layer
        behind = layer.mixed_size + layer.value_size
        columns = {"query": 0, "value": 2 * layer.key_size, "gate": layer.mixed_size, "rate": behind}
        case.projected[1, columns.get(place, behind + layer.num_value_heads)] = float("nan")
        check_delta(cpu, case)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"words": 500},
        {"heads": (2, 4), "dims": (16, 32), "words": 768, "parts": 2, "runs": 3},
        {"heads": (2, 2), "words": 500, "by_channel": True},
        {"dims": (8, 12)},
    ],
    ids=str,
)
def test_a_step_with_guesses_leaves_the_state_behind_each_token_as_a_step_of_it_would(cpu, dtype, sizes):
    case = DeltaCase([(4, 4), (1, 8), (6, 21), (2, 30)], dtype=dtype, by_token=True, **{"dims": (32, 48), **sizes})
    check_delta(cpu, case)
    is_left_to_torch = sizes.get("dims") == (8, 12)
    for found, expected in zip(case.run(cpu), case.run_apart(cpu), strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if is_left_to_torch and dtype == torch.float32 else {}
        if is_left_to_torch:
            torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
        else:
            assert found.nan_to_num().equal(expected.nan_to_num())


PLANS = {
    "decodes": [(1, 1), (1, 2), (1, 16), (1, 17), (1, 130)],
    "prompts": [(1, 1), (33, 33), (64, 64), (65, 65), (7, 7)],
    "chunks": [(5, 40), (1, 90), (64, 200), (31, 63), (40, 41)],
    "long": [(40, 600), (280, 281), (3, 513)],
    "guesses": [(2, 2), (4, 70), (8, 600), (5, 258), (3, 17)],
}


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 9, 70])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((21, 3), 80), ((8, 2), 24)])
def test_paged_attention(cpu, dtype, window, plan, heads, head_dim):
    case = AttentionCase(plan, heads, head_dim, block_size=16, dtype=dtype)
    found = cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=window)
    close(found, case.expected(window).to(dtype))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 9, 64, 100])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_attention_in_chunks(cpu, dtype, window, plan):
    case = AttentionCase(plan, (6, 2), 64, block_size=16, dtype=dtype)
    view = {"window": window, "is_chunked": True}
    close(
        cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, **view),
        case.expected(**view).to(dtype),
    )


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("heads", "head_dim"), [((21, 3), 64), ((11, 1), 48)])
@pytest.mark.parametrize(("softcap", "has_sinks", "window"), [(1.5, False, None), (None, True, 1), (0.7, True, 70)])
def test_attention_with_bounds_of_scores_and_sinks(cpu, dtype, plan, heads, head_dim, softcap, has_sinks, window):
    case = AttentionCase(plan, heads, head_dim, block_size=16, dtype=dtype)
    scoring = {"softcap": softcap, "sinks": case.sinks if has_sinks else None}
    found = cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=window, **scoring)
    close(found, case.expected(window, **scoring).to(dtype))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 1), 576), ((21, 1), 48), ((3, 1), 20)])
def test_attention_to_rows_that_are_key_and_value(cpu, dtype, kv_dtype, plan, heads, head_dim):
    """A latent's width in DeepSeek's models, an odd one, and one that is left to torch."""
    case = AttentionCase(plan, heads, head_dim, block_size=16, dtype=dtype, kv_dtype=kv_dtype, num_planes=1)
    found = cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.05, window=None)
    close(found, case.expected(None, scale=0.05).to(dtype))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [*((group, 64) for group in range(1, 13)), (8, 128), (7, 48), (9, 16)])
def test_decode_attention_of_every_group(cpu, dtype, group, head_dim):
    """As many query heads of a KV head as there are ways to take them together, and more."""
    case = AttentionCase(PLANS["decodes"], (2 * group, 2), head_dim, block_size=32, dtype=dtype)
    found = cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=None)
    close(found, case.expected(None).to(dtype))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize(("block_size", "plan"), [(16, [(2, 215), (7, 216)]), (4, [(2, 214), (3, 215)])])
def test_what_earlier_owners_left_in_a_block_reaches_no_token_through_a_hole(cpu, dtype, kv_dtype, block_size, plan):
    """Of a block that a hole repeats some tokens may not be written yet: NaN here."""
    case = AttentionCase(plan, (16, 2), 64, block_size, dtype=dtype, kv_dtype=kv_dtype)
    case.put_holes(window=1)
    found = cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=1)
    close(found, case.expected(1).to(dtype))


@needs_library
@pytest.mark.parametrize("plan", ["decodes", "prompts"])
def test_attention_hides_no_nan(cpu, plan):
    case = AttentionCase(PLANS[plan], (4, 2), 64, block_size=16)
    case.query[-1, 0, 0] = float("nan")
    out = cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=None)
    assert out[-1, :64].isnan().all()
    assert out[:-1].isfinite().all()


@needs_library
def test_loops_take_as_many_threads_as_torch_says_in_any_thread(cpu):
    """Also in one that torch has not computed in: the runtime beneath would answer with the machine's cores."""
    before, asked = torch.get_num_threads(), []
    ask = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: asked.append(num_threads_function()()) or asked[-1])
    x = torch.ones(64, 256)
    try:
        cpu.library.tandem_ask_threads(ctypes.cast(ask, ctypes.c_void_p))
        for threads in (1, 3):
            torch.set_num_threads(threads)
            computing = threading.Thread(target=cpu.act_and_mul, args=(x,))
            computing.start()
            computing.join()
    finally:
        cpu.library.tandem_ask_threads(ctypes.cast(num_threads_function(), ctypes.c_void_p))
        torch.set_num_threads(before)
    assert asked == [1, 3]


@needs_library
def test_threads_do_not_change_a_result(cpu):
    case = AttentionCase(PLANS["chunks"] * 3, (8, 4), 64, block_size=16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(cpu.paged_attention(case.query, case.pool, LAYER, case.batch, scale=0.3, window=None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def tasks() -> set[int]:
    return {int(task) for task in os.listdir("/proc/self/task")}


def sleeps(task: int) -> bool:
    """Or it has ended, as threads of other tests may."""
    try:
        return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(") ")[2].startswith("S")
    except (FileNotFoundError, ProcessLookupError):
        return True


def allow(task: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(task, cores)


def may_run_on(task: int, cores: set[int]) -> bool:
    try:
        return os.sched_getaffinity(task) == cores
    except ProcessLookupError:
        return True


def until(condition: Callable[[], bool], between: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        between()


@needs_library
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_helper_that_wakes_where_the_caller_runs_keeps_its_cores(cpu):
    """It sleeps on the core that the caller has then; it may run on others only until it is awake."""
    x, num_threads = torch.ones(1024, 2048), torch.get_num_threads()
    cores, caller = os.sched_getaffinity(0), threading.get_native_id()
    outs = list[torch.Tensor]()

    def compute() -> None:
        outs[1:] = [cpu.act_and_mul(x)]
        assert torch.equal(outs[0], outs[-1])

    try:
        torch.set_num_threads(2)
        outs.append(cpu.act_and_mul(x))  # now there is a helper
        others = tasks() - {caller}
        for task in (caller, *others):
            allow(task, {min(cores)})
        compute()
        until(lambda: all(map(sleeps, others)), os.sched_yield)
        for task in others:
            allow(task, cores)
        compute()
        until(lambda: all(may_run_on(task, cores) for task in others), compute)
    finally:
        torch.set_num_threads(num_threads)
        for task in tasks():
            allow(task, cores)


@needs_library
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 64), (5, 100), (9, 3001)])
def test_penalties(cpu, num_rows, vocab_size):
    check_penalties(num_rows, vocab_size, vocab_size, cpu)
    check_penalties(num_rows, vocab_size, vocab_size, REFERENCE)


@needs_library
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "num_masks"), [(4, 100, 3), (1, 1, 1), (3, 70_001, 2), (3, 64, 0), (5, 33, 5)]
)
def test_masks(cpu, num_rows, vocab_size, num_masks):
    check_masks(num_rows, vocab_size, num_masks, vocab_size, cpu)
    check_masks(num_rows, vocab_size, num_masks, vocab_size + 1, REFERENCE)


@needs_library
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 100, 2048, 5001])
def test_the_likeliest_of_the_allowed_tokens(cpu, vocab_size, seed):
    check_likeliest(vocab_size, seed, cpu)
    check_likeliest(vocab_size, seed, REFERENCE)
