"""Who a worker says that it is, in deterministic mode: the model, and the bits that it computes."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from services.worker.host import LoadedModel, load_model
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.errors import ConfigError
from tests.unit.kernels.isas import ISAS, SUMS, needs_library

pytestmark = needs_library

DEMO = Path(__file__).parents[3] / "models" / "demo"


def loaded(*flags: str) -> LoadedModel:
    always = ("--name", "w", "--model", str(DEMO), "--dtype", "bf16", "--num-kv-blocks", "16")
    return load_model(load_settings(WorkerSettings, [*always, *flags]), lambda *_: None)


def test_blocks_of_another_arithmetic_are_those_of_another_model() -> None:
    plain, deterministic, again = loaded(), loaded("--deterministic", "True"), loaded("--deterministic", "True")
    assert deterministic.fingerprint == again.fingerprint
    assert deterministic.fingerprint.startswith(f"{plain.fingerprint}-deterministic-")
    assert deterministic.roots.of("", 9) != plain.roots.of("", 9)


@pytest.mark.slow
def test_processors_that_compute_alike_have_one_identity() -> None:
    found = {isa: loaded("--deterministic", "True", "--kernels", f"cpu:{isa}").fingerprint for isa in ISAS}
    for isa, other in combinations(found, 2):
        alike = SUMS[isa] == SUMS[other]
        if not alike or SUMS[isa] == "fma":
            assert (found[isa] == found[other]) == alike, f"{isa} beside {other}"


@pytest.mark.parametrize("flags", [("--kernels", "torch"), ("--cpu-isa", "torch"), ("--dtype", "fp16")])
def test_what_has_no_such_mode_stops_the_start(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"deterministic|float16"):  # kernels that are named refuse the dtype first
        loaded("--deterministic", "True", *flags)
