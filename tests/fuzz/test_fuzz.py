"""Random requests of each kind to a real cluster: nothing crashes, and ordinary streams go on undisturbed."""

from __future__ import annotations

import pytest

from tests.e2e.running import DEMO
from tests.fuzz.__main__ import shares
from tests.fuzz.campaign import Findings
from tests.fuzz.cluster_target import fuzz_cluster


@pytest.mark.slow
@pytest.mark.skipif(not (DEMO / "model.safetensors").is_file(), reason="the demo model is not here")
async def test_a_thousand_cases_of_all_kinds_disturb_no_cluster(tmp_path):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: make setup")
    found = Findings()
    lags = await fuzz_cluster({**shares(800), "schema": 100, "services": 200, "adapters": 100}, found, tmp_path)
    print(dict(found.outcomes), lags)
    assert not found.failures, found.failures[:5]
    assert found.outcomes.keys() >= {
        *("http 200", "http 400", "grpc OK", "grpc INVALID_ARGUMENT", "schema 200", "schema 400"),
        *("load_lora_adapter 200", "load_lora_adapter 400", "unload_lora_adapter 200", "unload_lora_adapter 404"),
        *("prefill session OK", "decode session OK", "/tandem.v1.BlockService/LookUp OK"),
    }
    assert found.num_streams >= 2
