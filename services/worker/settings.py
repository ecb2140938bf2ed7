"""Settings that both kinds of worker have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.config import ServiceSettings


class WorkerSettings(ServiceSettings):
    """One engine process. The environment prefix is TANDEM_WORKER_, for both roles."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_WORKER_"}
    )

    renamed: ClassVar[Mapping[str, str]] = {"max_step_tokens": "max_num_batched_tokens"}

    name: str = Field(min_length=1, max_length=128)
    """Unique among the workers of a cluster; stays the same over restarts."""
    bind: str = "127.0.0.1:0"
    """host:port of the session server; port 0 = any free one."""
    model: Path
    """Model folder in Hugging Face layout."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of weights, computation and KV. auto: the checkpoint's, or fp32 where the processor lacks it."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the engine runs. On cuda, decode steps are CUDA graphs, each planned while the last one runs."""
    kernels: str = "auto"
    """Backend of the model's ops: triton (CUDA), cpu (C++), torch, or auto: the first that this machine can have."""
    debug_numerics: bool = False
    """Name the part of the model where NaN or infinite numbers begin, in the error that they cause. Costs speed."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads; 0 = one for each core of the affinity."""
    cpu_affinity: str = ""
    """Cores to stay on, comma-separated; empty = all."""
    kvstore: str = ""
    """host:port of the KV store; empty = no fleet index."""
    store: str = ""
    """Store nodes that take this worker's blocks and give prefixes: host:port or name=host:port, comma-separated; empty
    = none. Which node keeps which blocks follows from the names, so all workers must know the same ones."""
    prefix_fetch: Literal["auto", "always", "never"] = "auto"
    """auto: prompts are held a little for a prefix from peers or store nodes, and computed while it arrives. always:
    held until it is here. never: computed."""
    num_kv_blocks: int = Field(default=0, ge=0)
    """Blocks of the KV pool; 0 = from free memory."""
    block_size: Literal[16, 32, 64] = 16
    """Tokens in a block."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest sequence in tokens; 0 = the model's own limit. Cut to what the pool holds."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Most sequences that hold blocks at once."""
    max_num_batched_tokens: int = Field(default=512, ge=16, le=65536)
    """Token budget of one step: the size of a prompt's chunks."""
    output_length_quantile: float = Field(default=0.75, ge=0, le=1)
    """A request takes free blocks only beside those that running answers are expected to grow into: as long as this
    quantile of the answers that ended, at most their max_tokens. 0 = one block is kept for each."""
    host_swap_bytes: int = Field(default=256 << 20, ge=0)
    """Host memory for the blocks of preempted sequences; 0 = they are computed again. Bytes."""
    tpot_target_ms: float = Field(default=0.0, ge=0)
    """A decode batch grows only while its steps are predicted to take no longer; 0 = up to max_num_seqs."""
    max_overtaken_ms: float = Field(default=500.0, ge=0)
    """Short prompts are computed first, but never before one that has waited this long; 0 = in order of arrival."""
    max_unsent_share: float = Field(default=0.5, gt=0, le=1)
    """A prefill worker starts no prompt for a decode worker that has not taken blocks of more than this share of the
    pool."""
    handoff_timeout_s: float = Field(default=60.0, gt=0)
    """Net beneath the protocol: a hand-off that has not ended by then failed. Seconds."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long running requests may take after SIGTERM. Seconds."""
