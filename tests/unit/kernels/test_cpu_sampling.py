"""The C++ sampling, token for token, against the torch reference, with every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels.backends.cpu import CpuKernels, DeterministicCpuKernels
from shared.kernels.cpu.launch import LONGEST_SAMPLED
from shared.kernels.sampling import reference
from shared.kernels.sampling.rows import SamplingRows
from tests.examples import examples

from .isas import EACH_ISA, ISAS, VECTORS, every_isa, needs_both_vectors, needs_library
from .sampling_case import SamplingCase, wins_within_rounding

pytestmark = needs_library

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x,
    "equal": torch.zeros_like,
    "one has all the mass": lambda x: torch.where(torch.arange(len(x)) == len(x) // 2, x + 500.0, x),
    "half is banned": lambda x: torch.where(torch.arange(len(x)) % 2 == 1, -math.inf, x),
    "but the last is banned": lambda x: torch.where(torch.arange(len(x)) < len(x) - 1, -math.inf, x),
    "far apart": lambda x: 40.0 * x,
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0),
}


@pytest.fixture(scope="module", params=EACH_ISA)
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draws(num_rows: int, temperature: float = 1.0) -> SamplingRows:
    """That many rows which leave out no token, each with a random number of its own."""
    seeds = range(num_rows)
    return SamplingRows.from_lists(
        [temperature] * num_rows, [0] * num_rows, [1.0] * num_rows, [0.0] * num_rows, seeds, seeds
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "seed"),
    [(8, 100, 0), (8, 100, 1), (6, 3000, 2), (4, 5001, 3), (3, 1, 4), (0, 9, 5), (12, 2049, 6), (3, 32_000, 7)],
)
def test_tokens_equal_those_of_the_reference(
    cpu: CpuKernels, num_rows: int, vocab_size: int, seed: int, ties: bool
) -> None:
    case = SamplingCase(num_rows, vocab_size, seed, ties)
    before = case.logits.clone()
    tokens = cpu.sample_tokens(case.logits, case.rows).tolist()
    assert tokens == reference.sample_tokens(case.logits, case.rows).tolist()
    assert case.logits.equal(before)


@examples(150)
@given(
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 33, 100, 1000]),
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([1, 4, 64]),
    shape=st.sampled_from(sorted(SHAPES)),
    temperature=st.sampled_from([1e-38, 1e-6, 0.01, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 16, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.3, 1.0]),
)
def test_any_way_to_choose_gives_the_token_that_wins(
    cpu: CpuKernels, vocab_size: int, seed: int, steps: int, shape: str, temperature: float, top_k: int, top_p: float,
    min_p: float,
) -> None:  # fmt: skip
    """Logits are whole `steps`-ths, so that many are equal and no two nearly so."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(vocab_size, generator=generator) * 2 * steps
    logits = SHAPES[shape](numbers.round() / steps)[None].repeat(6, 1)
    rows = SamplingRows.from_lists(
        [temperature] * 6, [top_k] * 6, [top_p] * 6, [min_p] * 6, [seed] * 6, range(6)
    )  # fmt: skip
    tokens = cpu.sample_tokens(logits, rows).tolist()
    for row, (found, expected) in enumerate(zip(tokens, reference.sample_tokens(logits, rows).tolist(), strict=True)):
        assert found == expected or wins_within_rounding(logits[row], rows, row, found), f"{found}, not {expected}"


def test_of_equal_tokens_the_one_with_the_least_time_wins(cpu: CpuKernels) -> None:
    for num_rows, size in ((9, 1), (9, 70), (9, 1 << 12), (1, LONGEST_SAMPLED)):
        rows = draws(num_rows)
        expected = reference.race_times(rows.seeds, rows.positions, size).argmin(1)
        assert cpu.sample_tokens(torch.zeros(num_rows, size), rows).tolist() == expected.tolist()


@pytest.mark.slow
def test_the_longest_vocabularies_are_cut(cpu: CpuKernels) -> None:
    """Keys whose lower bits are nearly all set, of as many tokens as a tally counts."""
    size, logit = LONGEST_SAMPLED, math.log(1.0625 * (1 - 1e-6))
    logits = torch.full((1, size), logit)
    logits[0, 7] = logit + math.log(16.0)
    rows = SamplingRows.from_lists([1.0], [0], [0.5], [0.0], [4], [4])
    (token,) = cpu.sample_tokens(logits, rows).tolist()
    kept = int((size + 15) / 2 - 16)  # beside the likeliest, in weights of one of the many
    times = reference.race_times(rows.seeds, rows.positions, size)[0]
    speeds = torch.where(torch.arange(size) == 7, 16.0, 1.0) / times
    near = round(2e-6 * size)  # that rounding may move the end of top-p by
    assert token in {int(speeds[: kept + by].argmax()) for by in (-near, 0, near)}


@every_isa
@pytest.mark.parametrize("kind", [CpuKernels, DeterministicCpuKernels])
def test_a_row_depends_on_itself_alone(
    isa: str, kind: type[CpuKernels], threads: Callable[[int], None]
) -> None:  # fmt: skip
    kernels, case = kind(isa), SamplingCase(9, 3001, 8)
    threads(2)
    together = kernels.sample_tokens(case.logits, case.rows).tolist()
    threads(1)
    assert kernels.sample_tokens(case.logits, case.rows).tolist() == together
    for row, token in enumerate(together):
        rows = SamplingRows(*(column[row : row + 1] for column in vars(case.rows).values()))
        assert kernels.sample_tokens(case.logits[row : row + 1], rows).tolist() == [token]


@pytest.mark.slow
@needs_both_vectors
def test_avx2_and_avx512_choose_the_same_tokens() -> None:
    """Over enough tokens that nearly every boundary lies within rounding of the points."""
    logits = 0.3 * torch.randn(40, 200_000, generator=torch.Generator().manual_seed(0))
    rows = SamplingRows.from_lists(
        [0.9] * 40, [0, 150_000] * 20, [1.0, 0.9, 0.99, 0.8] * 10, [0.0] * 40, range(40), range(40)
    )
    found = [DeterministicCpuKernels(isa).sample_tokens(logits, rows).tolist() for isa in VECTORS]
    assert found[0] == found[1]


WAYS = {
    "temperature": (0.9, 0, 1.0, 0.0),
    "top-k": (1.0, 7, 1.0, 0.0),
    "top-p": (1.3, 0, 0.8, 0.0),
    "min-p": (1.0, 0, 1.0, 0.08),
    "all three": (0.8, 12, 0.9, 0.03),
}
"""(temperature, top_k, top_p, min_p)"""


def chances(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[vocab_size] fp64: of each token, by the definition; no two logits are equal."""
    found, order = (logits.double() / temperature).softmax(0).sort(descending=True)
    found = torch.where(found >= min_p * found[0], found, 0.0)
    found[top_k or len(found) :] = 0.0
    found = found / found.sum()
    found = torch.where(found.cumsum(0) - found < top_p, found, 0.0)
    return torch.zeros_like(found).scatter(0, order, found / found.sum())


def is_likely(counts: Tensor, expected: Tensor) -> bool:
    """Whether numbers of draws [n] fit those expected, by chi-square: four standard deviations above its mean are rarer
    than one in a thousand. The seeds are fixed, so the answer is always the same."""
    there = expected > 0
    statistic = ((counts - expected)[there] ** 2 / expected[there]).sum()
    freedom = int(there.sum()) - 1
    return not counts[~there].any() and float(statistic) < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "cpu", [isa if isa in ISAS[:1] else pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS], indirect=True
)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_as_frequent_as_their_chances(cpu: CpuKernels, way: str) -> None:
    """Of 100,000 seeds, at three positions; and the choices at two of them do not depend on one another."""
    num_seeds, vocab_size = 100_000, 24
    temperature, top_k, top_p, min_p = WAYS[way]
    logits = 1.2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))
    expected = chances(logits, *WAYS[way])
    rows = SamplingRows.from_lists(
        [temperature] * num_seeds, [top_k] * num_seeds, [top_p] * num_seeds, [min_p] * num_seeds, range(num_seeds),
        [0] * num_seeds,
    )  # fmt: skip
    found = []
    for position in (0, 1, 4097):
        there = replace(rows, positions=torch.full((num_seeds,), position))
        found.append(cpu.sample_tokens(logits.expand(num_seeds, -1).contiguous(), there))
        assert is_likely(found[-1].bincount(minlength=vocab_size).double(), num_seeds * expected)
    for a, b in ((0, 1), (1, 2)):
        pairs = (found[a] * vocab_size + found[b]).bincount(minlength=vocab_size**2).double()
        together = num_seeds * torch.outer(expected, expected).flatten()
        rare = (together > 0) & (together < 5)  # chi-square asks for a few draws of each
        pairs = torch.cat([pairs[~rare], pairs[rare].sum()[None]])
        assert is_likely(pairs, torch.cat([together[~rare], together[rare].sum()[None]]))


def test_two_models_choose_alike_as_often_as_a_shared_race_lets_them(cpu: CpuKernels) -> None:
    """At least as often as (1 - d) / (1 + d), where d is the distance of their distributions: Bavarian, Ghazi, Haeupler
    et al., "Optimality of Correlated Sampling Strategies" (2020)."""
    num_seeds, vocab_size = 20_000, 300
    generator = torch.Generator().manual_seed(5)
    target = 2.0 * torch.randn(vocab_size, generator=generator)
    draft = target + 0.7 * torch.randn(vocab_size, generator=generator)
    rows = draws(num_seeds)
    chosen = [cpu.sample_tokens(logits.expand(num_seeds, -1).contiguous(), rows) for logits in (target, draft)]
    alike = float((chosen[0] == chosen[1]).double().mean())
    distance = float((target.double().softmax(0) - draft.double().softmax(0)).abs().sum() / 2)
    assert (1 - distance) / (1 + distance) - 0.01 <= alike <= 1 - distance + 0.01
