"""The measured clusters: real processes, started as in a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.prefix.prompts import BLOCK_SIZE
from services.local.cluster import LocalCluster
from services.local.commands import TandemCommands
from services.local.spec import ClusterSpec
from shared.identity import WorkerRole
from shared.model.checkpoints import write_random_checkpoint
from shared.model.config.model_config import ModelConfig
from shared.settings.common import PrefixFetch

DEMO = Path(__file__).parents[3] / "models" / "demo"
MAX_MODEL_LEN = 8192
"""Longest sequence, tokens; the longest prompts of the conversation trace have 4,000 at this scale."""


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
    spec = ClusterSpec(
        model=setup.model,
        num_prefill=setup.num_workers,
        num_decode=setup.num_workers,
        dtype="fp32",
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        num_kv_blocks=setup.pool_blocks,
        store_host_bytes=setup.store_blocks * block_bytes(setup.model),
        prefix_fetch=setup.prefix_fetch,
        state_dir=folder / setup.name,
    )
    return LocalCluster(spec, commands=_Commands(spec, setup))


def block_bytes(model: Path) -> int:
    """Bytes of one fp32 block; raises ModelLoadError."""
    config = ModelConfig.load(model)
    return config.block_layout(BLOCK_SIZE, "float32").block_bytes


def write_tiny_model(folder: Path) -> Path:
    """Random weights that need almost no compute: the content of a cache does not depend on the model's size."""
    vocab_size = ModelConfig.load(DEMO).vocab_size
    write_random_checkpoint(
        folder, vocab_size=vocab_size, max_position_embeddings=MAX_MODEL_LEN, tie=True, tokenizer_from=DEMO
    )
    return folder


class _Commands(TandemCommands):
    """The real services with a throttled store or a router without an index."""

    def __init__(self, spec: ClusterSpec, setup: Setup) -> None:
        super().__init__(spec)
        self._throttle = ("--send-bytes-per-s", str(setup.send_bytes_per_s))
        self._indexed = setup.indexed

    def store_node(self, number: int, bind: str, redis_url: str) -> Sequence[str]:
        """See ServiceCommands."""
        return [*super().store_node(number, bind, redis_url), *self._throttle]

    def router(
        self, workers: Mapping[WorkerRole, Mapping[str, str]], kvstore: str, stores: str = "", number: int = 0
    ) -> Sequence[str]:
        """See ServiceCommands."""
        return super().router(workers, kvstore if self._indexed else "", stores, number)
