"""One model of a local cluster, with its workers: one frozen value, checked where it is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from shared.errors import ConfigError
from shared.identity import WorkerRole
from shared.settings.common import AdapterSettings, AliasSettings, EngineSettings, Mode, ModeSettings, TemplateSettings
from shared.settings.group import CheckedGroup

MAX_WORKERS = 64
"""Most workers of one role and model on one machine."""


def _usual_mode() -> Mode:
    """auto, or disaggregated where prefill workers differ from decode workers"""
    return "auto"


def _prefill_by_mode(values: Mapping[str, object]) -> int:
    """1, or 0 in collocated mode"""
    return 0 if values.get("mode") == "collocated" else 1


def _that_differs(values: Mapping[str, Any]) -> str:
    """The first option that makes prefill workers differ from decode workers; empty without one."""
    if values.get("prefill_kv_dtype", "same") != "same":
        return "prefill_kv_dtype"
    of_prefill = [name for name in ("prefill_tp", "prefill_ep") if values.get(name)]
    of_decode = [
        f"decode_{degree}"
        for degree in ("tp", "ep")
        if values.get(f"decode_{degree}") not in (None, 0, values.get(degree, 1))
    ]
    return next(iter(of_prefill + of_decode), "")


class PoolOptions(ModeSettings, TemplateSettings, EngineSettings, AdapterSettings, CheckedGroup):
    """What each model of a cluster has for itself; raises ConfigError naming the setting that is wrong."""

    mode: Mode = Field(default_factory=_usual_mode)
    """auto: one pool whose workers prefill and decode; for each request the router chooses where its prompt is computed
    and where its answer runs, by what the workers' steps take and by `targets.tpot_s`. disaggregated: two pools, one
    prefills, the other decodes; the default where an option makes prefill workers differ from decode workers.
    collocated: the decode workers prefill too, as in an ordinary serving system."""
    num_prefill: int = Field(default_factory=_prefill_by_mode, validation_alias="prefill")
    """Prefill workers; 1 by default, none in collocated mode. In auto mode they are of one pool with the others."""
    num_decode: int = Field(default=1, ge=1, le=MAX_WORKERS, validation_alias="decode")
    """Decode workers; in collocated and auto mode they prefill too."""

    @model_validator(mode="before")
    @classmethod
    def _choose_mode(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"mode": "disaggregated", **values} if _that_differs(values) else values

    @model_validator(mode="after")
    def _check_prefill(self) -> PoolOptions:
        low = 1 if self.mode == "disaggregated" else 0
        high = 0 if self.mode == "collocated" else MAX_WORKERS
        if not low <= self.num_prefill <= high:
            limit = f"{low}" if low == high else f"between {low} and {high}"
            option = _that_differs(vars(self)) if self.mode == "disaggregated" else ""
            # The mode follows from the option: a user who gave that knows nothing of modes.
            why = f"where {option} makes prefill workers differ" if option else f"in {self.mode} mode"
            raise ConfigError(
                f"prefill must be {limit} {why}, got {self.num_prefill}",
                field="prefill",
                value=self.num_prefill,
            )
        if self.converts_kv and self.mode != "disaggregated":
            raise ConfigError(
                f"prefill_kv_dtype {self.prefill_kv_dtype} beside kv_dtype {self.kv_dtype} needs two pools: mode is "
                f"{self.mode}",
                field="prefill_kv_dtype",
                value=self.prefill_kv_dtype,
            )
        return self


class ModelPools(PoolOptions, AliasSettings):
    """A model and its pools."""

    name: str
    """What clients call it."""
    model: Path
    """Model folder in Hugging Face layout."""
    mode: Mode = "disaggregated"
    """Code gets two pools unless it names a mode."""
    prefix: str = ""
    """What its workers' and store nodes' names begin with: nothing for a cluster's first model."""

    @property
    def workers(self) -> list[tuple[WorkerRole, str]]:
        """(role, name) of each, prefill first: `prefill-0`, …, `decode-0`, … behind the prefix; in auto mode they are
        `worker-0`, …, which decode and prefill."""
        if self.mode == "auto":
            count = self.num_prefill + self.num_decode
            return [(WorkerRole.DECODE, f"{self.prefix}worker-{number}") for number in range(count)]
        return [
            (role, f"{self.prefix}{role}-{number}")
            for role, count in ((WorkerRole.PREFILL, self.num_prefill), (WorkerRole.DECODE, self.num_decode))
            for number in range(count)
        ]


def worker_prefix(model_name: str) -> str:
    """For the workers of a cluster's further model: `qwen3-0.6b-` of Qwen/Qwen3-0.6B."""
    return re.sub(r"[^a-z0-9.]+", "-", model_name.rpartition("/")[2].lower()).strip("-") + "-"
