"""Deterministic kernels: a row does not depend on its mates, in C++ and in Triton."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.backend import DecoderOps
from shared.kernels.backends.cpu import DeterministicCpuKernels
from shared.kernels.backends.registry import choose_kernels
from shared.kernels.batch import AttentionBatch
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder

from . import deterministic_checks as checks
from .attention_case import LAYER, AttentionCase
from .compiling import TARGETS
from .conftest import Run
from .cpu_case import DTYPES, close, random, uneven_weight
from .deterministic_checks import logits
from .isas import EACH_ISA, VECTORS, every_isa, needs_both_vectors, needs_library

ROWS = 300
BLOCK_SIZE = 16
LENGTH = 210
CODES = (torch.int8, torch.float8_e4m3fn)
PAIRS = [
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float32, torch.bfloat16),
    *((dtype, codes) for dtype in DTYPES for codes in CODES),
]


@pytest.fixture(scope="module", params=EACH_ISA)
def cpu(request: pytest.FixtureRequest) -> DeterministicCpuKernels:
    return DeterministicCpuKernels(request.param)


def weight_of(in_size: int, out_size: int, dtype: torch.dtype) -> Tensor:
    if (in_size, out_size, dtype) == (1040, 96, torch.bfloat16):
        return uneven_weight()  # some weights lie outside their panel's table
    return random(out_size, in_size, dtype=dtype, seed=1)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 96), (1040, 96), (96, 64), (528, 160), (96, 35), (40, 32)])
def test_a_row_of_a_product_does_not_depend_on_how_many_there_are(
    cpu: DeterministicCpuKernels, dtype: torch.dtype, in_size: int, out_size: int
) -> None:
    x, bias = random(ROWS, in_size, dtype=dtype), random(out_size, dtype=dtype, seed=2)
    weight = weight_of(in_size, out_size, dtype)
    linear = cpu.make_linear(weight.clone(), bias, own=True)
    whole = linear.forward(x)
    close(whole, (x.double() @ weight.double().t() + bias.double()).to(dtype))
    for count in (*range(1, 20), 31, 32, 33, 36, 37, 64, 225, 299):
        for first in (0, ROWS - count):
            rows = slice(first, first + count)
            assert linear.forward(x[rows].contiguous()).equal(whole[rows]), f"{count} rows from {first} on"


def attend(
    cpu: DecoderOps, case: AttentionCase, chunks: list[tuple[int, int, int]], window: int | None, **scoring: Any
) -> list[Tensor]:
    """Results of `chunks`, (sequence, first token, token behind the last), computed in one step."""
    starts = [sum(length for _, length in case.plan[:i]) for i in range(len(case.plan))]
    query = torch.cat([case.query[starts[seq] + a : starts[seq] + b] for seq, a, b in chunks])
    batch = AttentionBatch.from_lists(
        [b - a for _, a, b in chunks], [b for _, _, b in chunks], [case.tables[seq] for seq, _, _ in chunks], BLOCK_SIZE
    )
    out = cpu.paged_attention(query, case.pool, LAYER, batch, scale=0.3, window=window, **scoring)
    return list(out.split([b - a for _, a, b in chunks]))


@needs_library
@pytest.mark.parametrize("window", [None, 33, 100])
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("heads", [(3, 3), (7, 1)], ids=str)
def test_each_token_attends_alike_alone_and_in_a_prompt(
    cpu: DeterministicCpuKernels,
    heads: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None,
) -> None:
    case = AttentionCase([(LENGTH, LENGTH)], heads, 32, BLOCK_SIZE, dtype=dtype, kv_dtype=kv_dtype)
    (whole,) = attend(cpu, case, [(0, 0, LENGTH)], window)
    close(whole, case.expected(window).to(dtype))
    for token in (*range(0, LENGTH, 7), 1, 15, 16, 62, 63, 64, 65, 127, 128, 129, LENGTH - 1):
        (alone,) = attend(cpu, case, [(0, token, token + 1)], window)
        assert alone.equal(whole[token : token + 1]), f"token {token}"
    for first, count in ((0, 2), (61, 4), (62, 8), (120, 3), (LENGTH - 5, 5)):
        (few,) = attend(cpu, case, [(0, first, first + count)], window)
        assert few.equal(whole[first : first + count]), f"{count} tokens from {first} on"


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_token_attends_alike_with_bounds_of_scores_and_sinks(
    cpu: DeterministicCpuKernels, dtype: torch.dtype
) -> None:
    case = AttentionCase([(LENGTH, LENGTH)], (6, 2), 32, BLOCK_SIZE, dtype=dtype)
    scoring = {"softcap": 1.5, "sinks": case.sinks}
    (whole,) = attend(cpu, case, [(0, 0, LENGTH)], 33, **scoring)
    close(whole, case.expected(33, **scoring).to(dtype))
    for token in (0, 1, 15, 16, 63, 64, 65, LENGTH - 1):
        (alone,) = attend(cpu, case, [(0, token, token + 1)], 33, **scoring)
        assert alone.equal(whole[token : token + 1]), f"token {token}"


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_between_the_products_stand_alone(cpu: DeterministicCpuKernels, dtype: torch.dtype) -> None:
    x, residual, weight = (random(n, 96, dtype=dtype, seed=n) for n in (40, 40, 1))
    normed, total = cpu.add_rms_norm(x, residual, weight[0], 1e-5)
    active = cpu.act_and_mul(x)
    for row in range(40):
        rows = slice(row, row + 1)
        one, its_total = cpu.add_rms_norm(x[rows], residual[rows], weight[0], 1e-5)
        assert one.equal(normed[rows])
        assert its_total.equal(total[rows])
        assert cpu.rms_norm(total[rows], weight[0], 1e-5).equal(normed[rows])
        assert cpu.act_and_mul(x[rows]).equal(active[rows])


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    ],
)
@every_isa
def test_logits_are_the_same_in_every_cut_and_company(
    tmp_path: Path, isa: str, architecture: str, extra: dict[str, int], dtype: torch.dtype
) -> None:
    write_random_checkpoint(
        tmp_path, architecture, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, extra_config=extra
    )
    decoder = Decoder.load(tmp_path, dtype, "cpu", kernels=f"cpu:{isa}", deterministic=True)
    length = 70
    whole = logits(decoder, [0, length], 0)
    assert whole.isfinite().all()
    for cuts in ([0, 33, length], [0, 1, 2, 64, 65, length], list(range(length + 1))):
        for mates in (0, 11):
            assert logits(decoder, cuts, mates).equal(whole), f"{cuts} beside {mates}"
    one_by_one = decoder.op_by_op(decoder.kernels)
    assert logits(one_by_one, [0, 33, length], 3).equal(whole)


@pytest.mark.parametrize("kv_dtype", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
@every_isa
def test_logits_over_codes_are_the_same_in_every_cut_and_company(
    tmp_path: Path, isa: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    write_random_checkpoint(tmp_path, "Qwen3ForCausalLM", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32)
    decoder = Decoder.load(tmp_path, dtype, "cpu", kernels=f"cpu:{isa}", deterministic=True)
    whole = logits(decoder, [0, 70], 0, kv_dtype)
    assert whole.isfinite().all()
    for cuts in ([0, 33, 70], [0, 1, 2, 64, 65, 70], list(range(71))):
        assert logits(decoder, cuts, 2, kv_dtype).equal(whole), f"cut at {cuts}"
    assert logits(decoder.op_by_op(decoder.kernels), [0, 33, 70], 3, kv_dtype).equal(whole)


@needs_library
@pytest.mark.slow
@needs_both_vectors
@pytest.mark.parametrize("kv_dtype", CODES)
def test_avx2_and_avx512_give_the_same_bits_over_codes(tmp_path: Path, kv_dtype: torch.dtype) -> None:
    write_random_checkpoint(tmp_path, "Qwen3ForCausalLM", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
    found = [
        logits(
            Decoder.load(tmp_path, torch.float32, "cpu", kernels=f"cpu:{isa}", deterministic=True), [0, 40, 41, 70], 1,
            kv_dtype,
        )
        for isa in VECTORS
    ]  # fmt: skip
    assert found[0].equal(found[1])


@needs_library
@pytest.mark.slow
@needs_both_vectors
@pytest.mark.parametrize("dtype", DTYPES)
def test_avx2_and_avx512_give_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    write_random_checkpoint(tmp_path, "Qwen3ForCausalLM", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32)
    found = [
        logits(Decoder.load(tmp_path, dtype, "cpu", kernels=f"cpu:{isa}", deterministic=True), [0, 40, 41, 90], 2)
        for isa in VECTORS
    ]
    assert found[0].equal(found[1])


@needs_library
@every_isa
def test_without_the_mode_a_token_alone_differs_from_the_same_in_a_prompt(isa: str) -> None:
    """So the tests above can fail."""
    kernels = choose_kernels("cpu", torch.float32, f"cpu:{isa}")
    case = AttentionCase([(LENGTH, LENGTH)], (6, 2), 32, BLOCK_SIZE)
    (whole,) = attend(kernels, case, [(0, 0, LENGTH)], None)
    (alone,) = attend(kernels, case, [(0, LENGTH - 1, LENGTH)], None)
    assert not alone.equal(whole[-1:])
    close(alone, whole[-1:])


@needs_library
def test_a_model_whose_ops_would_be_left_to_torch_is_refused(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "LlamaForCausalLM", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ConfigError, match=r"head_dim of 32, at most 512; here .* head_dim 16") as caught:
        Decoder.load(tmp_path, torch.float32, "cpu", deterministic=True)
    assert caught.value.field == "deterministic"


@needs_library
def test_other_kernels_have_no_such_mode() -> None:
    with pytest.raises(ConfigError, match=r"one of auto, triton, cpu with deterministic, not 'torch'"):
        choose_kernels("cpu", torch.float32, "torch", deterministic=True)
    with pytest.raises(ConfigError, match=r"not in torch.float16") as caught:
        choose_kernels("cpu", torch.float16, deterministic=True)
    assert caught.value.field == "deterministic"


WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_size", "out_size", "dtype"),
    [(64, 96, torch.float32), (72, 35, torch.float32), (300, 64, torch.float32), (96, 70, torch.float16)],
)
def test_a_row_of_a_triton_product_does_not_depend_on_how_many_there_are(
    interpreted: Run, in_size: int, out_size: int, dtype: torch.dtype
) -> None:
    interpreted(checks.check_product, in_size, out_size, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "in_size", "out_size"), [(130, 64, 300), (3, 72, 35), (1200, 20, 260)])
def test_tiles_for_many_rows_of_a_triton_product_give_the_bits_of_small_ones(
    interpreted: Run, num_rows: int, in_size: int, out_size: int
) -> None:
    interpreted(checks.check_large_tiles, num_rows, in_size, out_size, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "extra", "dtype"),
    [
        ("LlamaForCausalLM", {}, torch.float32),
        ("Qwen3ForCausalLM", WINDOWED, torch.float32),
        ("LlamaForCausalLM", {}, torch.float16),
    ],
)
def test_triton_logits_are_the_same_in_every_cut_and_company(
    interpreted: Run, tmp_path: Path, architecture: str, extra: dict[str, Any], dtype: torch.dtype
) -> None:
    write_random_checkpoint(
        tmp_path, architecture, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, extra_config=extra
    )
    interpreted(checks.check_logits, tmp_path, dtype, [[0, 17, 18, 24], [0, 1, 2, 3, 24]], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch",
    [
        "sm_80",
        "sm_90",
        "sm_100",
        "gfx942",
    ],
)
def test_prompts_and_answers_take_one_kernel_of_each_kind(compiled: Run, arch: str) -> None:
    """Two would be two orders of sums; two tilings of a product on compute capability 9.0 are one: their instruction
    differs in its columns alone."""
    kernels = compiled(checks.compile_all, torch.bfloat16, arch)
    products = [kernel for kernel in kernels if kernel.name == "multiply_tiles"]
    others = sorted(kernel.name for kernel in kernels if kernel.name != "multiply_tiles")
    assert others == ["plan_prefill_items", "prefill_tiles"]
    assert len(products) == (2 if arch == "sm_90" else 1)
    if arch == "sm_90":
        used = [set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\.aligned\S+", kernel.code)) for kernel in products]
        assert all(len(names) == 1 for names in used)
        assert {re.sub("n[0-9]+k", "k", name) for names in used for name in names} == {
            "wgmma.mma_async.sync.aligned.m64k16.f32.bf16.bf16"
        }
    assert [(kernel.name, kernel.stack_bytes) for kernel in kernels if kernel.stack_bytes] == []
    assert all(kernel.shared_bytes <= TARGETS[arch].shared_bytes for kernel in kernels)
    assert all(kernel.num_matrix_instructions > 0 for kernel in kernels if kernel.name != "plan_prefill_items")
