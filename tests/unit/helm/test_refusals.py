"""Values that cannot work are refused before anything is installed, with the name of the value."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.helm.charts import Helm, Refused

PREFILL: dict[str, Any] = {"name": "p", "role": "prefill", "replicas": 1}
DECODE: dict[str, Any] = {"name": "d", "role": "decode", "replicas": 1}
GPU = {"limits": {"nvidia.com/gpu": 1}}


def pools(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """A prefill and a decode pool with changes, in that order; a third change is a pool by itself."""
    made = [copy.deepcopy(PREFILL), copy.deepcopy(DECODE), {}][: max(2, len(changes))]
    for pool, change in zip(made, changes, strict=False):
        pool.update(change)
    return {"pools": made}


@dataclass(frozen=True)
class Bad:
    """Values, and what the message names."""

    name: str
    values: Mapping[str, Any]
    says: tuple[str, ...]
    kubernetes: str = field(default="1.34.0")


BAD = [
    # What the schema knows: typos, kinds, bounds.
    Bad("a-typo-at-the-top", {"poools": []}, ("poools",)),
    Bad("a-typo-in-a-pool", pools({"replica": 2}), ("pools.0", "replica")),
    Bad("a-typo-in-the-router", {"router": {"replcas": 2}}, ("router", "replcas")),
    Bad(
        "a-typo-in-a-service-setting",
        {"worker": {"config": {"max_model_length": 1}}},
        ("worker.config", "max_model_length"),
    ),
    Bad(
        "a-typo-in-a-nested-setting",
        {"router": {"config": {"placement": {"prefx": 1}}}},
        ("router.config.placement", "prefx"),
    ),
    Bad("a-setting-out-of-bounds", {"worker": {"config": {"gpu_memory": 1.5}}}, ("worker.config.gpu_memory",)),
    Bad("a-setting-of-the-charts-own", {"worker": {"config": {"name": "x"}}}, ("worker.config", "name")),
    Bad("a-typo-in-the-gateway", {"gateway": {"enable": True}}, ("gateway", "enable")),
    Bad("a-picker-on-the-port-of-an-api", {"gateway": {"port": 8000}}, ("gateway.port",)),
    Bad(
        "a-planner-of-collocated-pools",
        {"planner": {"enabled": True}, "pools": [{"name": "c", "role": "collocated", "replicas": 1}]},
        ("pools[0].role", "collocated", "planner.enabled"),
    ),
    Bad(
        "a-planner-of-an-elastic-pool-without-its-name",
        {"planner": {"enabled": True}, "pools": [{**PREFILL, "role": "auto"}]},
        ("planner.auto.pool: (empty) is not a pool with role: auto",),
    ),
    Bad(
        "a-budget-below-the-smallest-elastic-pool",
        {
            "planner": {"enabled": True, "gpuBudget": 2, "auto": {"pool": "p", "minWorkers": 3}},
            "pools": [{**PREFILL, "role": "auto"}],
        },
        ("planner.gpuBudget: 2", "take 3 GPUs"),
    ),
    Bad(
        "a-route-to-no-gateway",
        {"gateway": {"enabled": True, "httpRoute": {"enabled": True}}},
        ("gateway.httpRoute.parentRefs",),
    ),
    Bad("an-unknown-role", pools({"role": "both"}), ("pools.0.role", "collocated")),
    Bad("replicas-that-are-text", pools({"replicas": "two"}), ("pools.0.replicas", "integer")),
    Bad("negative-replicas", pools({"replicas": -1}), ("pools.0.replicas",)),
    Bad("a-pool-without-a-name", {"pools": [{"role": "collocated", "replicas": 1}]}, ("pools.0", "name")),
    Bad("a-name-that-no-object-may-have", pools({"name": "Prefill_1"}), ("pools.0.name",)),
    Bad("no-pools", {"pools": []}, ("pools",)),
    Bad("an-unknown-dtype", pools({"dtype": "fp8"}), ("pools.0.dtype", "bf16")),
    Bad("a-block-size-that-no-worker-has", pools({"blockSize": 48}), ("pools.0.blockSize",)),
    Bad("a-uri-of-an-unknown-scheme", {"model": {"uri": "ftp://host/model"}}, ("model.uri",)),
    Bad("a-size-without-a-unit-helm-knows", {"model": {"uri": "hf://a/b", "size": "40GB"}}, ("model.size",)),
    Bad(
        "a-redis-url-that-is-none",
        {"redis": {"enabled": False, "external": {"url": "http://r"}}},
        ("redis.external.url",),
    ),
    Bad("a-port-out-of-range", {"router": {"service": {"httpPort": 70000}}}, ("router.service.httpPort",)),
    Bad("an-argument-with-a-space", pools({"extraArgs": ["--max-num-seqs 8"]}), ("pools.0.extraArgs.0",)),
    # Values that moved: the schema names the new place.
    Bad("replicas-of-other-charts", {"replicaCount": 2}, ("replicaCount", "moved to pools[].replicas")),
    Bad(
        "one-prefill-section",
        {"prefill": {"replicas": 1}},
        ("prefill", "moved to an entry of pools with role: prefill"),
    ),
    Bad("model-artifacts", {"modelArtifacts": {"uri": "hf://a/b"}}, ("modelArtifacts", "moved to model")),
    Bad("the-url-beside-external", {"redis": {"url": "redis://r"}}, ("redis.url", "moved to redis.external.url")),
    Bad("the-pools-type", pools({"type": "prefill"}), ("pools.0.type", "moved to role")),
    # Contradictions, which the templates find.
    Bad("two-pools-of-one-name", pools({}, {"name": "p"}), ("pools[1].name", "p is the name of another pool")),
    Bad("a-pool-named-as-a-part", pools({"name": "router"}), ("pools[0].name", "another part")),
    Bad("nobody-can-decode", {"pools": [PREFILL]}, ("pools: none can decode",)),
    Bad("nobody-can-prefill", {"pools": [DECODE]}, ("pools: none can prefill",)),
    Bad(
        "decode-beside-collocated",
        pools({}, {}, {"name": "c", "role": "collocated", "replicas": 1}),
        ("pools: roles decode and collocated",),
    ),
    *(
        Bad(
            f"{role}-beside-auto",
            {"pools": [{**PREFILL, "role": "auto"}, {**DECODE, "role": role}]},
            (f"pools[1].role: {role}", "role: auto", "make all pools auto, or none"),
        )
        for role in ("prefill", "decode", "collocated")
    ),
    Bad(
        "a-group-beyond-a-node",
        pools({}, {"parallelism": {"tensor": 8, "pipeline": 4}}),
        ("pools[1].parallelism: 32 ranks", "at most 16"),
    ),
    Bad(
        "a-group-over-nodes-on-gpus",
        pools({"parallelism": {"pipeline": 2}, "devicesPerNode": 1, "resources": GPU}),
        ("pools[0].parallelism: 2 ranks over 2 Nodes", "devicesPerNode is 1", "device: cpu"),
    ),
    Bad(
        "a-group-that-leaves-a-node-half-empty",
        pools({"parallelism": {"tensor": 6}, "devicesPerNode": 4}),
        ("pools[0].parallelism: 6 ranks", "4 devicesPerNode do not divide"),
    ),
    Bad(
        "a-group-over-nodes-that-the-planner-scales",
        {
            **pools({"name": "prefill", "parallelism": {"tensor": 8}, "devicesPerNode": 4}, {"name": "decode"}),
            "planner": {"enabled": True},
        },
        ("pools[0].parallelism: 8 ranks over 2 Nodes", "planner.enabled"),
    ),
    Bad(
        "a-group-over-nodes-whose-blocks-are-encrypted",
        {
            **pools({"parallelism": {"pipeline": 2}, "devicesPerNode": 1}),
            "worker": {"config": {"block_encryption": "aes-gcm"}},
        },
        ("pools[0].config.block_encryption: aes-gcm", "2 ranks over 2 Nodes"),
    ),
    Bad(
        "a-group-that-meets-elsewhere-than-the-chart-says",
        pools({"config": {"group_leader": "elsewhere:1"}}),
        ("group_leader",),
    ),
    Bad(
        "gpus-of-a-worker-that-the-planner-counts-otherwise",
        {
            **pools(
                {
                    "name": "prefill",
                    "parallelism": {"tensor": 4},
                    "resources": {"limits": {"nvidia.com/gpu": 4}},
                },
                {"name": "decode"},
            ),
            "planner": {"enabled": True, "prefill": {"gpusPerWorker": 2}},
        },
        ("planner.prefill.gpusPerWorker: 2", "4 processes of one GPU each"),
    ),
    Bad("no-devices-on-a-node", pools({"devicesPerNode": 0}), ("pools.0.devicesPerNode",)),
    Bad("what-is-no-value-any-more", {"preview": {"groupsOverNodes": True}}, ("preview",)),
    Bad("a-groups-leader-among-the-flags", pools({"extraArgs": ["--group-leader=h:1"]}), ("--group-leader is set",)),
    Bad("a-groups-hosts-among-the-flags", pools({"extraArgs": ["--group-hosts=2"]}), ("pools[0].extraArgs: --group",)),
    Bad(
        "too-few-gpus-for-a-group",
        pools({"resources": GPU, "parallelism": {"tensor": 2}}),
        ("pools[0].resources.limits: nvidia.com/gpu: 1", "has 2 processes of one GPU each"),
    ),
    Bad(
        "a-groups-resources-that-are-no-plain-number",
        pools({"resources": {"requests": {"memory": "some"}}, "parallelism": {"pipeline": 2}}),
        ("resources.requests.memory of pool p", "some"),
    ),
    Bad("a-groups-degree-among-the-flags", pools({"extraArgs": ["--tp=2"]}), ("pools[0].extraArgs: --tp",)),
    Bad("experts-sets-among-the-flags", pools({"extraArgs": ["--ep", "2"]}), ("pools[0].extraArgs: --ep",)),
    Bad("a-groups-degree-among-the-settings", pools({"config": {"tp": 2}}), ("pools.0.config", "tp")),
    Bad(
        "experts-over-no-whole-sets",
        pools({"parallelism": {"tensor": 4, "expert": 3}}),
        ("pools[0].parallelism.expert: 3", "parallelism.tensor, which is 4"),
    ),
    Bad("unequal-weights", pools({"quantization": "int8"}, {}), ("pools[1]", "quantization=int8", "quantization=auto")),
    Bad("unequal-dtypes", pools({"dtype": "bf16"}, {"dtype": "fp16"}), ("pools[1].dtype", "dtype=bf16", "dtype=fp16")),
    Bad(
        "unequal-kv-dtypes",
        pools({}, {"config": {"kv_dtype": "bf16"}}),
        ("pools[1].kvDtype", "kvDtype=auto", "kvDtype=bf16"),
    ),
    Bad(
        "a-width-of-prefill-kv-for-one-pool",
        pools({"config": {"prefill_kv_dtype": "bf16"}}, {}),
        ("pools[1].prefill_kv_dtype", "prefill_kv_dtype=bf16", "prefill_kv_dtype=same"),
    ),
    Bad(
        "unequal-block-sizes",
        pools({"blockSize": 32}, {"extraArgs": ["--block-size=64"]}),
        ("pools[1].blockSize", "blockSize=32", "blockSize=64"),
    ),
    Bad("one-deterministic-pool", pools({"config": {"deterministic": True}}), ("pools[1].deterministic",)),
    Bad(
        "more-gpus-than-a-worker-uses",
        pools({"resources": {"limits": {"nvidia.com/gpu": 8}}}),
        ("pools[0].resources.limits", "raise replicas"),
    ),
    Bad(
        "adapters-that-take-all-memory",
        {
            **pools({"device": "cpu", "resources": {"limits": {"memory": "2Gi"}}}, {"device": "cpu"}),
            "worker": {"config": {"adapter_folders": "/adapters", "adapter_bytes": 2 << 30}},
        },
        ("pools[0].resources.limits.memory: 2Gi", "2684354560 bytes", "config.adapter_bytes"),
    ),
    Bad(
        "two-ways-to-a-gpu",
        pools({"resources": GPU, "dra": {"deviceClassName": "gpu.nvidia.com"}}),
        ("pools[0].dra", "choose one"),
    ),
    Bad("a-gpu-for-the-cpu", pools({"resources": GPU, "device": "cpu"}), ("pools[0].device",)),
    Bad("a-flag-that-the-chart-sets", pools({"extraArgs": ["--name=x"]}), ("pools[0].extraArgs: --name",)),
    Bad(
        "claims-where-there-are-none",
        pools({"dra": {"deviceClassName": "gpu.nvidia.com"}}),
        ("pools[0].dra", "device plugin"),
        "1.29.0",
    ),
    Bad("no-redis", {"redis": {"enabled": False}}, ("redis: set redis.enabled: true", "redis.external.url")),
    Bad("two-redis", {"redis": {"external": {"url": "redis://r"}}}, ("redis.enabled: true", "redis.external")),
    Bad(
        "a-url-with-a-password-and-a-secret",
        {"redis": {"enabled": False, "external": {"url": "redis://u:p@r", "existingSecret": "s"}}},
        ("redis.external.existingSecret",),
    ),
    Bad("a-hub-model-without-a-size", {"model": {"uri": "hf://org/name"}}, ("model.size",)),
    Bad(
        "a-bucket-without-a-downloader", {"model": {"uri": "s3://bucket/m", "size": "1Gi"}}, ("model.downloaderImage",)
    ),
    Bad("a-size-for-a-claim", {"model": {"uri": "pvc://models/m", "size": "1Gi"}}, ("model.size", "pvc://models/m")),
    Bad("an-image-volume-too-early", {"model": {"uri": "oci://r.io/m:1"}}, ("model.uri", "1.31"), "1.29.0"),
    Bad(
        "more-host-memory-than-the-limit",
        {"kvstore": {"hostMemory": "8Gi", "resources": {"limits": {"memory": "8Gi"}}}},
        ("kvstore.hostMemory", "8Gi"),
    ),
    Bad(
        "a-shared-claim-of-a-class",
        {"kvstore": {"volume": {"enabled": True, "sharedClaim": "nfs", "storageClassName": "fast"}}},
        ("kvstore.volume.storageClassName", "sharedClaim"),
    ),
    Bad("a-shared-claim-that-is-off", {"kvstore": {"volume": {"sharedClaim": "nfs"}}}, ("kvstore.volume.sharedClaim",)),
    Bad(
        "a-maximum-below-the-minimum",
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 2}}},
        ("router.autoscaling.maxReplicas",),
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_value_is_refused_by_name(helm: Helm, bad: Bad) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(values=bad.values, kubernetes=bad.kubernetes)
    message = str(refused.value)
    assert [part for part in bad.says if part not in message] == []


def test_the_values_that_the_bad_ones_start_from_are_good(helm: Helm) -> None:
    assert "demo-p" in helm.render(values=pools())
    cpu = {"device": "cpu", "resources": {"limits": {"memory": "2Gi"}}}
    assert "demo-p" in helm.render(
        values={**pools(cpu), "worker": {"config": {"adapter_folders": "/adapters", "adapter_bytes": 1 << 30}}}
    )
