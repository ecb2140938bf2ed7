"""FlashInfer as a backend: what it is told of a step, how often, and where it is refused. No GPU: a double computes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.kernels.attention.flashinfer import attend, wrappers
from shared.kernels.attention.flashinfer.pages import PagedSequences, split_step
from shared.kernels.backends import registry
from shared.kernels.backends.registry import choose_kernels
from shared.kernels.batch import AttentionBatch

from . import attention_checks, comparing
from .attention_case import LAYER, AttentionCase
from .conftest import Run
from .flashinfer_double import Double

MIXED = [(1, 1), (9, 9), (1, 37), (5, 70), (2, 2), (1, 16)]
LENGTHS = st.tuples(st.integers(1, 40), st.integers(0, 90)).map(lambda pair: (pair[0], sum(pair)))
PLANS = st.lists(st.one_of(LENGTHS, st.integers(1, 90).map(lambda kv_len: (1, kv_len))), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "WORKSPACE_BYTES", 1024)


def check_attention(plan: list[tuple[int, int]], window: int | None = None, **shape: object) -> Double:
    case = AttentionCase(plan, dtype=torch.float16, **{"head_dim": 64, "block_size": 16, **shape})  # type: ignore[arg-type]
    assert attend.suits(case.query, case.kv_blocks)
    library = Double()
    output = attend.paged_attention(
        wrappers.Wrappers(library), case.query, case.kv_blocks, LAYER, case.batch,
        scale=attention_checks.scale_of(case), window=window,
    )  # fmt: skip
    comparing.assert_near(output, attention_checks.exact_attention(case, window))
    return library


def rebuilt(seqs: PagedSequences, block_size: int) -> list[tuple[int, int, list[int]]]:
    """(query_len, kv_len, block ids) of each sequence, from FlashInfer's form."""
    starts = seqs.page_start.tolist()
    query_lens = seqs.query_start.diff().tolist()
    found = []
    for seq, (query_len, last) in enumerate(zip(query_lens, seqs.last_page_lens.tolist(), strict=True)):
        pages = seqs.pages[starts[seq] : starts[seq + 1]].tolist()
        assert 1 <= last <= block_size
        found.append((query_len, (len(pages) - 1) * block_size + last, pages))
    return found


@given(plan=PLANS, block_size=st.sampled_from([1, 3, 16]), spare=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_pages_say_what_block_tables_say(plan: list[tuple[int, int]], block_size: int, spare: int) -> None:
    ids = iter(range(7, 10_000, 3))
    tables = [[next(ids) for _ in range(-(-kv_len // block_size) + spare)] for _, kv_len in plan]
    batch = AttentionBatch.from_lists(*zip(*plan, strict=True), tables, block_size)
    step = split_step(batch)
    rows: list[int] = []
    for seqs, is_kind in ((step.decodes, lambda n: n == 1), (step.chunks, lambda n: n > 1)):
        own = [seq for seq, (query_len, _) in enumerate(plan) if is_kind(query_len)]
        assert (seqs is None) == (not own)
        if seqs is None:
            continue
        assert rebuilt(seqs, block_size) == [
            (*plan[seq], tables[seq][: -(-plan[seq][1] // block_size)]) for seq in own
        ]  # fmt: skip
        begins = batch.query_start.tolist()
        expected = [row for seq in own for row in range(begins[seq], begins[seq + 1])]
        assert seqs.token_rows is None if len(own) == len(plan) else seqs.token_rows.tolist() == expected
        rows += expected
    assert sorted(rows) == list(range(batch.num_tokens))


@given(
    plan=PLANS,
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([16, 32]),
    window=st.one_of(st.none(), st.integers(1, 60)),
)
@settings(max_examples=40, deadline=None)
def test_attention_equals_the_formula(
    plan: list[tuple[int, int]], group: int, block_size: int, window: int | None
) -> None:
    check_attention(plan, window, heads=(2 * group, 2), block_size=block_size)


def test_single_tokens_and_chunks_go_to_their_own_wrappers() -> None:
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    assert check_attention([(1, 5), (1, 40)]).planned() == [decode]
    assert check_attention([(3, 5), (40, 40)]).planned() == [prefill]
    assert check_attention(MIXED).planned() == [decode, prefill]


def test_a_step_is_planned_once_for_all_layers_with_the_same_window() -> None:
    case = AttentionCase(MIXED, dtype=torch.float16, head_dim=64, block_size=16)
    library = Double()
    planned = wrappers.Wrappers(library)
    for window in (None, 7, None, 7):
        output = attend.paged_attention(
            planned, case.query, case.kv_blocks, LAYER, case.batch, scale=attention_checks.scale_of(case), window=window
        )
        comparing.assert_near(output, attention_checks.exact_attention(case, window))
    assert len(library.planned()) == 4  # two kinds, two windows


def test_a_step_may_be_planned_while_another_one_runs_and_no_more() -> None:
    library = Double()
    planned = wrappers.Wrappers(library)
    cases = [AttentionCase([(1, n)], dtype=torch.float16, head_dim=64, block_size=16, seed=n) for n in (9, 40, 70)]

    def attend_over(case: AttentionCase) -> None:
        output = attend.paged_attention(planned, case.query, case.kv_blocks, LAYER, case.batch, scale=0.1, window=None)
        comparing.assert_near(output, case.expected(None, 0.1))

    for case in (cases[0], cases[1], cases[0], cases[1]):
        attend_over(case)
    assert len(library.planned()) == 2
    attend_over(cases[2])
    attend_over(cases[1])
    with pytest.raises(AssertionError, match="planned anew"):
        attend_over(cases[0])
    made = [name for name, method, _, _ in library.calls if method == "__init__"]
    assert len(made) == wrappers.WRAPPERS


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype"),
    [(80, torch.float16, None), (64, torch.float32, None), (64, torch.float32, torch.bfloat16)],
)
def test_other_shapes_do_not_suit(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    case = AttentionCase([(1, 5)], head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    assert not attend.suits(case.query, case.kv_blocks)


def attend_as_a_backend() -> list[str]:  # in another process, where no fixture works
    from shared.kernels.backends.flashinfer import FlashInferKernels

    wrappers.WORKSPACE_BYTES = 1024
    library = Double()
    kernels = FlashInferKernels(library)
    for head_dim in (64, 48):
        case = AttentionCase(MIXED, dtype=torch.float16, head_dim=head_dim, block_size=16)
        output = kernels.paged_attention(
            case.query, case.kv_blocks, LAYER, case.batch, scale=attention_checks.scale_of(case), window=None
        )
        comparing.assert_near(output, attention_checks.exact_attention(case, None))
    return [kernels.name, *library.planned()]


def test_the_backend_leaves_other_shapes_to_triton(interpreted: Run) -> None:
    assert interpreted(attend_as_a_backend) == [
        "flashinfer", "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
    ]  # fmt: skip


def run_bench_cases() -> list[str]:
    from loadtest.bench.kernels.limits import Limits
    from loadtest.bench.kernels.measure import measure
    from shared.kernels.attention.bench_batch import HeadShape
    from shared.kernels.attention.flashinfer import bench

    def clock(run: Callable[[], object]) -> float:
        run()
        return 1e-6

    sys.modules["flashinfer"] = Double()  # type: ignore[assignment]
    wrappers.WORKSPACE_BYTES = 1024
    heads = HeadShape(2, 1, 64, 16, torch.float16)
    found = bench.cases(torch.device("cpu"), [((20, 5), heads)], [(((8, 8),), heads)])
    results = [measure(case, Limits("a device", 4e12, 8e14), clock)[0] for case in found]
    return [result.name.partition(",")[0] for result in results]


def test_its_benchmark_runs_each_shape_beside_ours(interpreted: Run) -> None:
    ours = ["decode attention", "prefill attention"]
    assert interpreted(run_bench_cases) == [
        ours[0], f"{ours[0]} by flashinfer", ours[1], f"{ours[1]} by flashinfer", "torch sdpa",
    ]  # fmt: skip


def test_it_is_refused_by_name_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'flashinfer' cannot serve .*flashinfer-python") as caught:
        choose_kernels("cuda", torch.bfloat16, "flashinfer")
    assert caught.value.field == "kernels"


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", torch.bfloat16, "not a CUDA device"), ("cuda", torch.float32, "take bfloat16 or float16")],
)
def test_it_is_refused_where_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=reason):
        choose_kernels(device, dtype, "flashinfer")


def test_a_broken_installation_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    (backend,) = (backend for backend in registry.backends() if backend.name == "flashinfer")
    with pytest.raises(ConfigError, match="cannot be imported"):
        backend.load()


def test_auto_never_chooses_it() -> None:
    assert [backend.devices for backend in registry.backends() if backend.name == "flashinfer"] == [()]


def test_our_calls_fit_the_installed_library() -> None:
    """Without a GPU: that names and places of the arguments are those of its signatures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its packages' own
        library = pytest.importorskip("flashinfer", reason="the package flashinfer is not installed")
    calls = [call for plan in ([(1, 5)], [(3, 5)]) for call in check_attention(plan, 7).calls]
    assert {method for _, method, _, _ in calls} == {"__init__", "plan", "run"}
    for name, method, args, kwargs in calls:
        wrapper = getattr(library, name)
        inspect.signature(getattr(wrapper, method)).bind(None, *args, **kwargs)
        if method == "plan" and hasattr(wrapper, "_plan_impl"):  # where newer versions name the options
            inspect.signature(wrapper._plan_impl).bind(None, *args, **kwargs)
