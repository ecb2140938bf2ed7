"""What tells workers apart that compute the same model in other bits."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.fingerprints import deterministic_fingerprint, difference
from shared.model.arithmetic import arithmetic_digest
from shared.model.decoder import Decoder
from tests.unit.kernels.isas import ISAS, SUMS, needs_library

DEMO = Path(__file__).parents[3] / "models" / "demo"


def digest(dtype: torch.dtype, kernels: str = "auto", *, deterministic: bool = True) -> str:
    decoder = Decoder.load(DEMO, dtype, "cpu", kernels=kernels, deterministic=deterministic)
    return arithmetic_digest(decoder, decoder.config.block_layout(16, str(dtype).removeprefix("torch.")))


@pytest.mark.slow
@needs_library
def test_instruction_sets_with_the_same_sums_have_the_same_digest() -> None:
    found = {isa: digest(torch.bfloat16, f"cpu:{isa}") for isa in ISAS}
    for isa, other in combinations(found, 2):
        alike = SUMS[isa] == SUMS[other]
        if not alike or SUMS[isa] == "fma":
            assert (found[isa] == found[other]) == alike, f"{isa} beside {other}"


@needs_library
def test_kernels_without_the_mode_are_found_out() -> None:
    with pytest.raises(ConfigError, match=r"kernels cpu:\S+ compute a prompt differently whole and in parts") as caught:
        digest(torch.float32, deterministic=False)
    assert caught.value.field == "deterministic"


def test_what_differs_is_said() -> None:
    ours, theirs = (deterministic_fingerprint("m", arithmetic) for arithmetic in ("1a", "2b"))
    assert difference(ours, theirs).startswith("computes model m in other bits (1a) than the fleet (2b)")
    assert difference("m", theirs) == "runs without deterministic, the fleet with it"
    assert difference(ours, "m") == "runs with deterministic, the fleet without it"
    assert difference("n", theirs) == f"serves model n, the fleet {theirs}"
    assert difference("n", "m") == "serves model n, the fleet m"
