"""The cluster that `tandem fit --measured` names: a router that runs, or the file that it once answered."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.json_format import ParseDict, ParseError

from shared.errors import ConfigError
from shared.identity import WorkerRole
from shared.rpc.convert import groups_of, roles_from_proto, step_times_from_proto
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.settings.common import Mode

if TYPE_CHECKING:
    from loadtest.simulator.prediction import MeasuredCluster, MeasuredWorker

_TIMEOUT_S = 30.0
_MAX_BYTES = 1 << 26
_MODES: dict[str, Mode] = {"auto": "auto", "disaggregated": "disaggregated", "collocated": "collocated"}


def measured_cluster(place: str, api_key: str) -> MeasuredCluster:
    """From `http(s)://HOST:PORT`, a router's HTTP API, or a file: what `tandem record` wrote beside its trace, or
    `tandem status --json` printed. Raises ConfigError (`measured`)."""
    text = _fetched(place, api_key) if place.startswith(("http://", "https://")) else _read(place)
    try:
        status = ParseDict(json.loads(text), inference_pb2.ClusterStatus(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, ParseError) as error:  # the parsers' own too
        raise ConfigError(f"--measured: {place} is not the status of a cluster: {error}", field="measured") from error
    if status.models:
        raise ConfigError(
            f"--measured: {place} serves {len(status.models)} models; fit counts the workers of one",
            field="measured",
        )
    if status.mode not in _MODES or not status.workers:
        raise ConfigError(f"--measured: {place} names no workers", field="measured")
    return _cluster(status)


def _read(place: str) -> str:
    try:
        return Path(place).read_text()
    except (OSError, UnicodeDecodeError) as error:
        hint = "" if "/" in place or "." in place else "; a router is http://HOST:PORT"
        raise ConfigError(f"--measured: cannot read {place}: {error}{hint}", field="measured") from error


def _fetched(place: str, api_key: str) -> str:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{place.rstrip('/')}/status", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            text: str = answer.read(_MAX_BYTES).decode()
            return text
    except urllib.error.HTTPError as error:
        why = "it needs an API key: --api-key" if error.code in (401, 403) else f"it answers {error.code}"
        raise ConfigError(f"--measured: {place}: {why}", field="measured") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last: no HTTP, or no URL
        raise ConfigError(f"--measured: {place} does not answer: {error}", field="measured") from error


def _cluster(status: inference_pb2.ClusterStatus) -> MeasuredCluster:
    from loadtest.simulator.prediction import MeasuredCluster

    workers = [_worker(worker) for worker in status.workers if worker.connected]
    prefills = status.mode != "disaggregated" or any(worker.prefills for worker in workers)
    if not prefills or not any(worker.decodes for worker in workers):
        missing = "decodes" if prefills else "prefills"
        raise ConfigError(f"--measured: no worker that {missing} is connected", field="measured")
    return MeasuredCluster(
        _MODES[status.mode],
        workers,
        status.window.ttft_target_ms / 1e3,
        status.window.tpot_target_ms / 1e3,
        status.refused_above_ms / 1e3,
        status.max_queued_tokens or 2048,
    )


def _worker(worker: inference_pb2.WorkerStatus) -> MeasuredWorker:
    from loadtest.simulator.prediction import MeasuredWorker

    load, roles = worker.load, roles_from_proto(worker.roles or [worker.role])
    if not roles:
        raise ConfigError(f"--measured: worker {worker.worker.name!r} has no role", field="measured")
    groups = groups_of(worker)
    num_tokens = min(groups.max_tokens(load.num_total_blocks), load.num_total_blocks * groups.block_size)
    return MeasuredWorker(
        worker.worker.name,
        WorkerRole.PREFILL in roles,
        WorkerRole.DECODE in roles,
        step_times_from_proto(load.step_times) if load.HasField("step_times") else None,
        num_tokens // groups.block_size,
        groups.block_size,
        worker.pool_bytes // max(1, num_tokens),
        worker.max_num_seqs,
        worker.max_num_batched_tokens,
        not worker.kernels.startswith("cpu"),
        max(1, worker.tp) * max(1, worker.pp),
    )
