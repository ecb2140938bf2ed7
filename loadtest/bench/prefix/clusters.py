"""The measured clusters: real processes, started as in a deployment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.prefix.prompts import BLOCK_SIZE
from loadtest.rig.cluster import Extras, local_cluster
from loadtest.rig.models import DEMO, write_model
from services.local.cluster import LocalCluster
from shared.model.config.model_config import ModelConfig
from shared.settings.common import PrefixFetch


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster."""

    name: str
    model: Path
    num_workers: int
    """Workers in each pool."""
    pool_blocks: int
    """Blocks of each worker."""
    store_blocks: int = 0
    """Blocks in the store's host memory; 0 = no store."""
    indexed: bool = True
    """Whether the router uses the index. Without it, the router places prompts by load only, with random ties."""
    prefix_fetch: PrefixFetch = "always"
    send_bytes_per_s: float = 0.0
    """Limit of the store's sending rate; 0 = no limit."""


def make_cluster(setup: Setup, folder: Path) -> LocalCluster:
    """A cluster that has not been started, on free ports, with its logs under `folder`. Raises ModelLoadError."""
    block_bytes = ModelConfig.load(setup.model).block_layout(BLOCK_SIZE, "float32").block_bytes
    return local_cluster(
        Extras(store_flags=("--send-bytes-per-s", str(setup.send_bytes_per_s)), indexed=setup.indexed),
        model=setup.model,
        num_prefill=setup.num_workers,
        num_decode=setup.num_workers,
        dtype="fp32",
        num_kv_blocks=setup.pool_blocks,
        store_host_bytes=setup.store_blocks * block_bytes,
        prefix_fetch=setup.prefix_fetch,
        state_dir=folder / setup.name,
    )


def write_tiny_model(folder: Path) -> Path:
    """A model that needs almost no compute: the content of a cache does not depend on the model's size."""
    return write_model(folder, {"head_dim": 8}, DEMO)
