"""The chart's values for what `tandem fit` found."""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from shared.errors import ConfigError
from shared.model.ranks.shard import MAX_DEGREE
from shared.sizing.adapter_memory import rank_class
from shared.sizing.fit import Fit
from shared.sizing.load import PoolFit
from shared.sizing.shapes import KV_CODES

_QUANTIZED = ("fp8", "int8", "int4")
_GPU_RESOURCE = {"MI300X": "amd.com/gpu"}


def values_yaml(fit: Fit, uri: str) -> str:
    """One pool where collocated serves the load better, else two. `uri` may be empty: then it is for the reader."""
    pools = [fit.collocated] if fit.takes_one_pool and fit.collocated is not None else [fit.prefill, fit.decode]
    model: dict[str, object] = {"uri": uri} if uri else {}
    if uri.startswith(("hf://", "s3://")):  # what the Pods fetch needs room
        model["size"] = f"{math.ceil(1.2 * 2 * fit.model.num_params / (1 << 30))}Gi"
    content: dict[str, object] = {"model": model} if model else {}
    content["pools"] = [_pool(pool, fit) for pool in pools]
    head = ["# Written by `tandem fit`."]
    if not uri:
        head.append("# Set model.uri: hf://…, pvc://…, s3://… or /path.")
    head += [f"# {line}" for line in not_yet(fit)]
    return "\n".join(head) + "\n" + yaml.safe_dump(content, sort_keys=False)


def not_yet(fit: Fit) -> list[str]:
    """The parts of the fit that the chart refuses today, each with the option that avoids it."""
    pools = [fit.prefill, fit.decode]
    found = []
    if (most := max(pool.gpus_each for pool in pools)) > MAX_DEGREE:
        found.append(
            f"a worker has at most {MAX_DEGREE} processes, this has up to {most}; the chart takes what --max-tensor "
            f"{MAX_DEGREE} gives"
        )
    return found


def _pool(pool: PoolFit, fit: Fit) -> dict[str, object]:
    weights = fit.hardware.weights
    resource = _GPU_RESOURCE.get(pool.gpu, "nvidia.com/gpu")
    entry: dict[str, object] = {
        "name": pool.role,
        "role": pool.role,
        "replicas": pool.workers,
        "parallelism": {"tensor": pool.spread.tensor, "pipeline": pool.spread.pipeline, "expert": pool.spread.expert},
        "resources": {"limits": {resource: pool.gpus_each}},
        "dtype": "bf16" if weights in _QUANTIZED else weights,
    }
    if weights in _QUANTIZED:
        entry["quantization"] = weights
    kv_dtype = fit.hardware.kv_dtype
    if kv_dtype in KV_CODES or (kv_dtype, entry["dtype"]) == ("bf16", "fp32"):  # other pairs are served by no worker
        entry["kvDtype"] = kv_dtype
    if fit.hardware.adapter_slots:
        entry["config"] = {
            "adapter_slots": fit.hardware.adapter_slots,
            "adapter_bytes": fit.hardware.adapter_bytes(fit.model),
            **({"adapter_host_bytes": copies} if (copies := fit.hardware.adapter_host_bytes(fit.model)) else {}),
            "adapter_max_rank": rank_class(fit.hardware.adapter_rank),
        }
    return entry


def write_values(path: Path, text: str) -> None:
    """Raises ConfigError (`values`)."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--values: cannot write {path}: {error.strerror}", field="values") from error
