"""Random damage to model files raises nothing but ModelLoadError."""

from __future__ import annotations

from tests.fuzz.model_files import fuzz_files


def test_damaged_headers_are_refused_as_such(tmp_path):
    outcomes, failures = fuzz_files(3000, tmp_path)
    assert not failures, failures[:3]
    kinds = ("safetensors bytes", "safetensors JSON", "GGUF bytes")
    assert outcomes.keys() == {f"{kind}: {outcome}" for kind in kinds for outcome in ("refused", "read")}
