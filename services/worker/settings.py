"""Settings of prefill and decode workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from services.worker.group_settings import GroupSettings
from shared.address import parse_named
from shared.config import ServiceSettings
from shared.errors import ConfigError
from shared.identity import Roles, WorkerRole
from shared.kv.encryption_modes import NO_ENCRYPTION
from shared.kv.packing import Compression
from shared.rpc.fleet_settings import FleetSettings
from shared.settings.common import (
    AdapterSettings,
    AnswerSettings,
    BlockSize,
    EncryptionSettings,
    EngineSettings,
)
from shared.settings.named_folders import parse_adapters
from shared.telemetry.settings import MetricsPageSettings, SpanSettings, VllmMetricsSettings

MIN_CHUNK = 16
CHUNK = 512
GPU_PREFILL_CHUNK = 2048
"""Tokens of a step that keep a GPU's matrix units busy."""
SEQUENCES = 64
GPU_SEQUENCES = 256
"""Rows of a decode step up to which each further one costs a GPU little beside reading the weights."""


class WorkerSettings(
    ServiceSettings,
    GroupSettings,
    FleetSettings,
    EncryptionSettings,
    MetricsPageSettings,
    VllmMetricsSettings,
    SpanSettings,
    EngineSettings,
    AdapterSettings,
    AnswerSettings,
):
    """One engine process. The environment prefix is TANDEM_WORKER_, whatever its roles."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_WORKER_"}
    )

    renamed: ClassVar[Mapping[str, str]] = {"max_step_tokens": "max_num_batched_tokens"}

    name: str = Field(min_length=1, max_length=128)
    """Name of the worker: unique in the cluster, and the same after a restart."""
    bind: str = "127.0.0.1:0"
    """host:port of the session server; port 0 = any free one."""
    model: Path
    """Model folder in Hugging Face layout."""
    weights_from: str = ""
    """Workers, host:port and comma-separated, from which the model folder is fetched over UCX where it is missing or
    not whole; of a name with several addresses, any. Empty = the folder has to be there."""
    block_compression: Compression = "off"
    """Whether hand-offs send blocks of floats packed, without loss: bf16 in some 0.7 of their bytes, fp32 and states in
    0.85. off: never, and none are taken packed; on: always, where both workers have it; auto: to another host, where
    the rates that both have measured of link, packing and unpacking say that it is faster. Only on the CPU: blocks of
    GPUs are sent as they are."""
    kvstore: str = ""
    """host:port of the KV store; empty = no fleet index."""
    store: str = ""
    """Store nodes to offer blocks to and to fetch prefixes from: host:port or name=host:port, comma-separated; empty =
    none. The names decide which node stores which blocks, so all workers must have the same list."""
    block_size: BlockSize = 16
    """Tokens in a block."""
    max_num_seqs: int = Field(default=0, ge=0, le=4096)
    """Most sequences that hold blocks at once, at most `max_num_batched_tokens`. 0 = 256 on a GPU, 64 otherwise,
    or as many as that where it is less."""
    max_num_batched_tokens: int = Field(default=0, ge=0, le=65536)
    """Most tokens in one step, so also the size of a prompt's chunks: at least 16. 0 = 2048 for a prefill worker on a
    GPU, 512 otherwise, and never less than `max_num_seqs`: a chunk's blocks are sent while the next one is computed."""
    output_length_quantile: float = Field(default=0.75, ge=0, le=1)
    """A request starts only with free blocks beyond those that running answers are expected to need. Each is expected
    to become as long as this quantile of finished answers, at most its max_tokens. 0 = one block is kept for each."""
    host_swap_bytes: int = Field(default=-1, ge=-1)
    """Host memory for the blocks of preempted sequences; 0 = they are recomputed. -1 = 256 MiB beside a pool in host
    memory, and on a GPU as much as the pool has, but at most 8 GiB and an eighth of the memory that is free. Bytes."""
    tpot_target_ms: float = Field(default=-1.0, ge=-1)
    """A decode batch grows only while its steps are predicted to take at most this, and prompts beside running answers
    are computed in chunks that leave each answer this much a token in the mean. Milliseconds; 0 = no such limit, and
    -1 = the routers' targets.tpot_s, the least of them."""
    itl_target_ms: float = Field(default=0.0, ge=0)
    """Greatest gap between two tokens of an answer that a prompt's chunk may cause, where there is a tpot target.
    Milliseconds; 0 = three times that target."""
    max_overtaken_ms: float = Field(default=100.0, ge=0)
    """Short prompts are computed first, but not before one that has waited this long. Milliseconds; 0 = in order of
    arrival."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Time for running requests to end after SIGTERM. Seconds."""

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _check_chunk(cls, value: int, info: ValidationInfo) -> int:
        if 0 < value < MIN_CHUNK:
            raise ValueError(f"must be 0 or at least {MIN_CHUNK}")
        num_seqs = info.data.get("max_num_seqs", 0)
        if 0 < value < num_seqs:
            raise ValueError(f"must be 0 or at least max_num_seqs, {num_seqs}: a token of each in a step")
        return value

    @field_validator("adapters")
    @classmethod
    def _check_named(cls, value: str) -> str:
        try:
            parse_adapters(value)
        except ConfigError as error:
            raise ValueError(error.message) from error
        return value

    @field_validator("weights_from")
    @classmethod
    def _check_peers(cls, value: str) -> str:
        try:
            parse_named(value, "weights_from", unnamed=True)
        except ConfigError as error:
            raise ValueError(error.message) from error
        return value

    @property
    def has_adapters(self) -> bool:
        """Whether requests may ask for adapters."""
        return bool(self.adapters or self.adapter_folders)

    @property
    def sends_from_gpu(self) -> bool:
        """Whether blocks are to leave straight from a GPU's memory, where UCX can."""
        if self.gpu_direct != "auto":
            return self.gpu_direct
        return self.is_on_gpu and self.tp * self.pp == 1 and self.block_encryption == NO_ENCRYPTION

    @property
    def head_folder(self) -> Path | None:
        """Folder of a head that is not the checkpoint's own."""
        return Path(self.draft) if self.draft and self.speculation == "heads" else None

    def for_roles(self, roles: Roles) -> Self:
        """The same settings, with the defaults that depend on the roles filled in, and no draft model where nothing
        would ask it."""
        # Chunks delay the tokens of running answers; a worker that only prefills has none.
        chunk = GPU_PREFILL_CHUNK if self.is_on_gpu and WorkerRole.DECODE not in roles else CHUNK
        num_tokens = self.max_num_batched_tokens or max(chunk, self.max_num_seqs)
        num_seqs = self.max_num_seqs or min(num_tokens, GPU_SEQUENCES if self.is_on_gpu else SEQUENCES)
        filled = {
            "max_num_batched_tokens": num_tokens,
            "max_num_seqs": num_seqs,
            "draft": self.draft if self.head_folder or (WorkerRole.DECODE in roles and self.may_draft) else "",
        }
        return self.model_copy(update=filled)
