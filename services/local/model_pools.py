"""One model of a local cluster, with its workers: one frozen value, checked where it is built."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shared.errors import ConfigError
from shared.identity import WorkerRole

Mode = Literal["disaggregated", "collocated"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
KVDtype = Literal["auto", "fp32", "bf16"]

MAX_WORKERS = 64
"""Most workers of one role and model on one machine."""


@dataclass(frozen=True, slots=True)
class ModelPools:
    """A model and its pools; raises ConfigError naming the setting that is wrong."""

    name: str
    """The model's name for clients."""
    model: Path
    """Model folder in Hugging Face layout."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may use."""
    num_prefill: int = 1
    """Prefill workers; 0 in collocated mode."""
    num_decode: int = 1
    """Decode workers; in collocated mode they prefill too."""
    mode: Mode = "disaggregated"
    dtype: Dtype = "auto"
    """Dtype of weights and computation; auto = the checkpoint's."""
    kv_dtype: KVDtype = "auto"
    """Dtype of the KV cache; auto = as the computation."""
    num_kv_blocks: int = 0
    """Blocks in each worker's KV pool; 0 = from free memory."""
    max_model_len: int = 0
    """Longest sequence in tokens; 0 = the model's own limit."""
    prefix: str = ""
    """Prefix of the names of its workers and store nodes; empty for a cluster's first model."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, get_args(Mode)),
            ("dtype", self.dtype, get_args(Dtype)),
            ("kv_dtype", self.kv_dtype, get_args(KVDtype)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", field=name)
        fewest = 0 if self.mode == "collocated" else 1
        most = 0 if self.mode == "collocated" else MAX_WORKERS
        check_range("prefill", self.num_prefill, fewest, most, f" in {self.mode} mode")
        check_range("decode", self.num_decode, 1, MAX_WORKERS)
        check_range("num_kv_blocks", self.num_kv_blocks, 0, 2**31 - 1)
        check_range("max_model_len", self.max_model_len, 0, 2**31 - 1)

    @property
    def workers(self) -> list[tuple[WorkerRole, str]]:
        """(role, name) of each, prefill first: `prefill-0`, …, `decode-0`, … behind the prefix."""
        return [
            (role, f"{self.prefix}{role}-{number}")
            for role, count in ((WorkerRole.PREFILL, self.num_prefill), (WorkerRole.DECODE, self.num_decode))
            for number in range(count)
        ]


def worker_prefix(model_name: str) -> str:
    """For the workers of a cluster's further model: `qwen3-0.6b-` of Qwen/Qwen3-0.6B."""
    return re.sub(r"[^a-z0-9.]+", "-", model_name.rpartition("/")[2].lower()).strip("-") + "-"


def check_range(field: str, value: int, low: int, high: int, where: str = "") -> None:
    """Raises ConfigError (`field`) for a value outside its bounds, both included."""
    if not low <= value <= high:
        limit = f"{low}" if low == high else f"between {low} and {high}"
        raise ConfigError(f"{field} must be {limit}{where}, got {value}", field=field, value=value)
