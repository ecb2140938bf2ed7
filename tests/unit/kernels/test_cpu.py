"""The C++ kernels against their torch references, and what is said where they cannot be had."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.kernels import cpu_backend
from shared.kernels.cpu import build
from shared.kernels.cpu.linear import OneDnnLinear, PackedLinear, PanelLinear, TightLinear
from shared.kernels.registry import choose_kernels
from shared.kernels.torch_backend import TorchKernels

from .attention_case import LAYER, AttentionCase

REFUSAL = cpu_backend.refusal(torch.device("cpu"), torch.float32)
needs_library = pytest.mark.skipif(REFUSAL is not None, reason=f"no C++ kernels here: {REFUSAL}")
REFERENCE = TorchKernels()
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def cpu() -> cpu_backend.CpuKernels:
    return cpu_backend.CpuKernels()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "in_size", "out_size"),
    [
        *((rows, 64, 96) for rows in (0, 1, 2, 3, 4, 12, 13, 36, 37, 75)),
        (3, 16, 32),
        (5, 1040, 160),
        (240, 1040, 160),  # more rows, and more of a row, than are worked on at a time
        (4, 96, 35),
        (60, 40, 32),
    ],
)
def test_linear(cpu, dtype, rows, in_size, out_size):
    x, weight = random(rows, in_size, dtype=dtype), random(out_size, in_size, dtype=dtype, seed=1)
    for bias in (None, random(out_size, dtype=dtype, seed=2)):
        linear = cpu.make_linear(weight.clone(), bias, own=True)
        assert isinstance(linear, PackedLinear) == (out_size % 32 == 0 and in_size % 16 == 0)
        assert (linear.in_size, linear.out_size, linear.dtype) == (in_size, out_size, dtype)
        exact = (x.double() @ weight.double().t() + (0 if bias is None else bias.double())).to(dtype)
        close(linear.forward(x), exact)


@needs_library
def test_linear_hands_on_nan_and_infinity(cpu):
    x = random(5, 64, dtype=torch.bfloat16)
    x[1, 3], x[4, 60] = float("nan"), float("inf")
    out = cpu.make_linear(random(96, 64, dtype=torch.bfloat16, seed=1), None, own=True).forward(x)
    assert out[1].isnan().all()
    assert not out[4].isfinite().any()
    assert out[[0, 2, 3]].isfinite().all()


def plain_panels(cpu: cpu_backend.CpuKernels, weight: torch.Tensor) -> PanelLinear:
    return PanelLinear.pack(lambda: cpu.library, weight.clone(), None)


def tightened(cpu: cpu_backend.CpuKernels, weight: torch.Tensor) -> TightLinear:
    """Its memory is changed."""
    linear = cpu.make_linear(weight, None, own=True)
    if not cpu.library.tandem_reads_tight():
        pytest.skip("this processor multiplies pairs of bf16, from plain panels")
    assert isinstance(linear, TightLinear), "the panels are plain"
    return linear


def tight_panels(cpu: cpu_backend.CpuKernels, weight: torch.Tensor) -> TightLinear:
    return tightened(cpu, weight.clone())


ROWS = (1, 2, 3, 4, 11, 12, 13, 36, 37, 300)


def unit(in_size: int) -> torch.Tensor:
    """Rows of which each picks one column of a weight."""
    return torch.eye(in_size, dtype=torch.bfloat16)


@needs_library
@pytest.mark.parametrize("rows", ROWS)
def test_tight_panels_give_the_very_bits_that_plain_ones_give(cpu, rows):
    """Eight exponents only, so that no weight is rare: those are added in another order."""
    signs, lower = random(96, 528, dtype=torch.bfloat16), random(96, 528, dtype=torch.bfloat16, seed=1).abs()
    weight = torch.copysign(0.01 + lower.clamp(max=1.0), signs)
    x = random(rows, 528, dtype=torch.bfloat16, seed=2)
    tight, plain = tight_panels(cpu, weight), plain_panels(cpu, weight)
    assert tight.nbytes < 0.76 * plain.nbytes
    assert tight.forward(x).equal(plain.forward(x))


@needs_library
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([16, 528, 1040]),
    scale=st.floats(1e-30, 1e30),
    num_odd=st.integers(0, 12),
    odd=st.sampled_from([0.0, -0.0, 1e-39, 1e-20, -1e-10, 1e20, 3e38]),
    num_zero=st.integers(0, 100_000),
)
def test_every_weight_comes_back_from_tight_panels(cpu, seed, size, scale, num_odd, odd, num_zero):
    weight = scale * random(64, size, dtype=torch.float32, seed=seed)
    places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))
    weight.view(-1)[places[:num_zero]] = 0.0
    weight.view(-1)[places[:num_odd]] = odd
    weight = weight.to(torch.bfloat16)
    linear = cpu.make_linear(weight, None, own=False)
    x = unit(size)
    for rows in (x[:1], x[:16], x):
        assert linear.forward(rows.contiguous()).equal(weight.t()[: rows.shape[0]] + 0.0)


@needs_library
@pytest.mark.parametrize("rows", ROWS)
def test_rare_weights_are_multiplied_too(cpu, rows):
    weight = random(96, 1040, dtype=torch.bfloat16)
    places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(1))
    weight.view(-1)[places[:150]] *= 1e6
    weight.view(-1)[places[150:300]] *= 1e-12
    for output, column in ((0, 0), (31, 511), (0, 512), (63, 1039)):  # ends of panels, and of what is opened at a time
        weight[output, column] = 1e9
    x = random(rows, 1040, dtype=torch.bfloat16, seed=2)
    close(tight_panels(cpu, weight).forward(x), (x.double() @ weight.double().t()).to(x.dtype))


@needs_library
def test_nan_and_infinite_weights_show_in_their_outputs(cpu):
    weight = random(96, 64, dtype=torch.bfloat16)
    weight[3, 7], weight[40, 63] = float("nan"), float("-inf")
    out = tight_panels(cpu, weight).forward(random(5, 64, dtype=torch.bfloat16, seed=1))
    assert out[:, 3].isnan().all()
    assert out[:, 40].isinf().all()
    assert out[:, [i for i in range(96) if i not in (3, 40)]].isfinite().all()


@needs_library
def test_weights_of_many_exponents_keep_plain_panels(cpu):
    exponents = torch.randint(-60, 60, (96, 64), generator=torch.Generator().manual_seed(3))
    weight = (random(96, 64, dtype=torch.float32) * 2.0**exponents).to(torch.bfloat16)
    linear = cpu.make_linear(weight.clone(), None, own=True)
    assert isinstance(linear, PanelLinear)
    assert linear.forward(unit(64)).equal(weight.t() + 0.0)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_not_its_own_stays_as_it_is(cpu, dtype):
    weight, x = random(96, 64, dtype=dtype), random(3, 64, dtype=dtype, seed=1)
    kept = weight.clone()
    linear = cpu.make_linear(weight, None, own=False)
    assert weight.equal(kept)
    assert linear.forward(x).equal(cpu.make_linear(weight, None, own=True).forward(x))


@needs_library
def test_tightening_frees_the_weight(cpu):
    weight = random(96, 64, dtype=torch.bfloat16)
    view = weight[32:]
    tightened(cpu, weight)
    assert view.untyped_storage().nbytes() == 0
    both = random(192, 64, dtype=torch.bfloat16)
    kept = both[96:].clone()
    tightened(cpu, both[:96])
    assert both[96:].equal(kept)


@needs_library
def test_tight_panels_of_another_size_are_refused(cpu):
    tight = tight_panels(cpu, random(96, 64, dtype=torch.bfloat16))
    for wrong in (48, 80):
        with pytest.raises(AssertionError, match="columns times panels"):
            tight.forward(random(2, wrong, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match=r"float32 times torch\.bfloat16"):
        tight.forward(random(2, 64, dtype=torch.float32))


@needs_library
def test_weights_of_other_dtypes_are_not_packed(cpu):
    with pytest.raises(AssertionError, match="float16 is neither"):
        cpu.make_linear(random(96, 64, dtype=torch.float16), None, own=True)


@needs_library
def test_with_amx_the_weights_are_packed_by_onednn(cpu, monkeypatch):
    monkeypatch.setattr(cpu, "_has_amx", True)
    x, weight = random(3, 64, dtype=torch.bfloat16), random(96, 64, dtype=torch.bfloat16, seed=1)
    exact = (x.double() @ weight.double().t()).to(x.dtype)
    linear = cpu.make_linear(weight, None, own=True)
    assert isinstance(linear, OneDnnLinear)
    close(linear.forward(x), exact)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 256), (40, 688), (3, 24)])
def test_norms_and_silu(cpu, dtype, rows, size):
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    close(cpu.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    for found, expected in zip(
        cpu.add_rms_norm(x, residual, weight, 1e-5), REFERENCE.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        close(found, expected)
    gate_up = 8 * random(rows, 2 * size, dtype=dtype, seed=3)
    close(cpu.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@needs_library
def test_silu_at_the_ends_of_its_range(cpu):
    gate = torch.tensor([-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 1e30] * 4)
    gate_up = torch.cat((gate, torch.ones(32)))[None]
    torch.testing.assert_close(cpu.silu_mul(gate_up), REFERENCE.silu_mul(gate_up), rtol=1e-5, atol=1e-30)


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
        kernels.rotate_and_write(query, key, value, cos, sin, pool, 1, slots, **norm, eps=1e-5)
        for kernels, pool in zip((cpu, REFERENCE), pools, strict=True)
    ]
    close(*placed)
    close(*pools)


PLANS = {
    "decodes": [(1, 1), (1, 2), (1, 16), (1, 17), (1, 130)],
    "prompts": [(1, 1), (33, 33), (64, 64), (65, 65), (7, 7)],
    "chunks": [(5, 40), (1, 90), (64, 200), (31, 63), (40, 41)],
}


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 9, 70])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((21, 3), 80), ((8, 2), 24)])
def test_paged_attention(cpu, dtype, window, plan, heads, head_dim):
    case = AttentionCase(plan, heads, head_dim, block_size=16, dtype=dtype)
    found = cpu.paged_attention(case.query, case.kv_blocks, LAYER, case.batch, scale=0.3, window=window)
    close(found, case.expected(window).to(dtype))


@needs_library
@pytest.mark.parametrize("plan", ["decodes", "prompts"])
def test_attention_hides_no_nan(cpu, plan):
    case = AttentionCase(PLANS[plan], (4, 2), 64, block_size=16)
    case.query[-1, 0, 0] = float("nan")
    out = cpu.paged_attention(case.query, case.kv_blocks, LAYER, case.batch, scale=0.3, window=None)
    assert out[-1, :64].isnan().all()
    assert out[:-1].isfinite().all()


@needs_library
def test_threads_do_not_change_a_result(cpu):
    case = AttentionCase(PLANS["chunks"] * 3, (8, 4), 64, block_size=16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(cpu.paged_attention(case.query, case.kv_blocks, LAYER, case.batch, scale=0.3, window=None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"_cpu_flags": lambda: frozenset({"sse2"})}, "the processor lacks avx512f"),
        ({"shutil": type("Nothing", (), {"which": staticmethod(lambda name: None)})}, "g++ is not installed"),
    ],
)
def test_without_processor_or_compiler_the_reason_is_given_and_torch_serves(monkeypatch, caplog, broken, reason):
    if "shutil" in broken:
        monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset(build.NEEDED_FLAGS))
    for name, value in broken.items():
        monkeypatch.setattr(build, name, value)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        choose_kernels("cpu", torch.float32, "cpu")
    with caplog.at_level(logging.WARNING):
        assert choose_kernels("cpu", torch.float32).name == "torch"
    assert "'cpu' passed over" in caplog.text


@needs_library
def test_the_library_is_compiled_once(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(build, "_compile", lambda compiler, target: (compiled.append(target), target.touch()))
    assert build.library() == build.library()
    assert len(compiled) == 1


@needs_library
def test_what_the_compiler_says_is_the_reason(monkeypatch, tmp_path):
    (tmp_path / "broken.cpp").write_text("#error no such thing\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(build.CannotBuild, match=r"g\+\+ failed"):
        build.library()
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_library
def test_fp16_is_left_to_torch():
    with pytest.raises(ConfigError, match=r"float32 and bfloat16, not in torch.float16"):
        choose_kernels("cpu", torch.float16, "cpu")
    assert choose_kernels("cpu", torch.float16).name == "torch"
