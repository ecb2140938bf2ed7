"""The chart's values for what `tandem fit` found."""

from __future__ import annotations

import math

import yaml

from shared.sizing.fit import Fit
from shared.sizing.load import PoolFit

_QUANTIZED = ("fp8", "int8", "int4")
_GPU_RESOURCE = {"MI300X": "amd.com/gpu"}


def values_yaml(fit: Fit, uri: str) -> str:
    """One pool where collocated serves the load better, else two. `uri` may be empty: then it is for the reader."""
    pools = [fit.collocated] if fit.collocated_is_better and fit.collocated is not None else [fit.prefill, fit.decode]
    model: dict[str, object] = {"uri": uri} if uri else {}
    model["size"] = f"{math.ceil(1.2 * fit.prefill.weight_bytes * fit.prefill.tensor / (1 << 30))}Gi"
    content = {"model": model, "pools": [_pool(pool, fit) for pool in pools]}
    head = ["# Written by `tandem fit`."]
    if not uri:
        head.append("# Set model.uri: hf://…, pvc://…, s3://… or /path.")
    return "\n".join(head) + "\n" + yaml.safe_dump(content, sort_keys=False)


def _pool(pool: PoolFit, fit: Fit) -> dict[str, object]:
    weights = fit.hardware.weights
    resource = _GPU_RESOURCE.get(pool.gpu, "nvidia.com/gpu")
    entry: dict[str, object] = {
        "name": pool.role,
        "role": pool.role,
        "replicas": pool.workers,
        "parallelism": {"tensor": pool.tensor, "pipeline": 1, "expert": 1},
        "resources": {"limits": {resource: pool.tensor}},
        "dtype": "bf16" if weights in _QUANTIZED else weights,
    }
    if weights in _QUANTIZED:
        entry["quantization"] = weights
    return entry
