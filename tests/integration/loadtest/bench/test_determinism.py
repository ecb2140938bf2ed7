"""The count of answers that depend on their batch: some without deterministic mode, none with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtest.bench.determinism.answers import BATCH, share_of_other_bits, share_of_other_tokens
from loadtest.bench.determinism.measure import Asked, differing
from shared.engine.plan import SampledToken
from tests.unit.kernels.isas import needs_library

DEMO = Path(__file__).parents[4] / "models" / "demo"


def test_an_answer_differs_by_one_token_or_by_one_bit() -> None:
    one, other, bit = (SampledToken(1, -0.5),), (SampledToken(2, -0.5),), (SampledToken(1, -0.25),)
    assert share_of_other_tokens([one, other, bit, one], [one] * 4) == 0.25
    assert share_of_other_bits([one, other, bit, one], [one] * 4) == 0.5


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_differ_without_the_mode_alone(deterministic: bool) -> None:
    # AVX2: pairs of bf16 happen to sum alike in any batch.
    asked = Asked(BATCH, 12, (0.0,))
    found = differing(DEMO, torch.bfloat16, "cpu:avx2", asked, deterministic=deterministic)
    bits = [result.value for result in found if result.name.endswith("other bits")]
    assert len(bits) == 2
    assert bits == [0.0, 0.0] if deterministic else min(bits) > 0
