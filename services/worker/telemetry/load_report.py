"""A worker's load as its routers get it, at most once an interval; with the memory and the hand-offs that it counts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.blocks.connector import KVConnector
from shared.engine.messages import EngineLoad
from shared.kv.transfer import TransferCounters
from shared.kv_index.holders import Tier
from shared.rpc.convert import step_times_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2

REFRESH_S = 1.0
"""Reports come every few milliseconds; the figure moves slowly."""


class ResidentMemory:
    """Resident set size as Linux counts it, read at most once in REFRESH_S."""

    def __init__(self, statm: Path = Path("/proc/self/statm")) -> None:
        """`statm` is in the format of proc(5): sizes in pages, the resident one second."""
        self._statm = statm
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._read_at = float("-inf")
        self._num_bytes: int | None = None

    def num_bytes(self, now: float) -> int | None:
        """In bytes; None where the system has no such file. `now` is a monotonic time in seconds."""
        if now - self._read_at >= REFRESH_S:
            self._read_at = now
            try:
                self._num_bytes = int(self._statm.read_text().split()[1]) * self._page_bytes
            except (OSError, IndexError, ValueError):
                self._num_bytes = None
        return self._num_bytes


FINISHED, FAILED = "finished", "failed"


@dataclass(slots=True)
class ShipmentCounters:
    """Sums since start over hand-offs that were not cancelled. One thread adds, any may read."""

    num_ended: dict[str, int] = field(default_factory=lambda: {FINISHED: 0, FAILED: 0})
    total_s: float = 0.0
    """From a hand-off's first block to its trailer's arrival."""
    exposed_s: float = 0.0
    """The part behind the first token: it is not hidden by computing, and the request waits for it."""

    def ended(self, total_s: float, exposed_s: float, *, failed: bool) -> None:
        """Adds a hand-off that has ended; its times count only if it was completed."""
        self.num_ended[FAILED if failed else FINISHED] += 1
        if not failed:
            self.total_s += total_s
            self.exposed_s += exposed_s


REPORT_INTERVAL_S = 0.005
"""Seconds between two reports at least: a change after a longer time is sent at once, those within it together."""


class LoadReporter:
    """Coalesces engine loads into `Load` messages."""

    def __init__(
        self,
        counters: TransferCounters,
        publish: Callable[[types_pb2.Load], None],
        connector: KVConnector,
    ) -> None:
        """`publish` sends a report to every session."""
        self._counters = counters
        self._connector = connector
        self._publish = publish
        self._newest: EngineLoad | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_at = float("-inf")
        self._resident = ResidentMemory()
        self.draining = False
        self.paused = False
        """Whether a change of the weights keeps new requests out."""
        self.asleep = False
        """There are no weights; it is paused too."""
        self.model_fingerprint = ""
        """The weights' fingerprint, where it has changed since the start; else empty."""

    @property
    def takes_work(self) -> bool:
        """Whether new requests may come."""
        return not (self.draining or self.paused)

    def update(self, load: EngineLoad) -> None:
        """Takes a new state; it is published within REPORT_INTERVAL_S."""
        self._newest = load
        if self._timer is None:
            # Not at once: what one turn of the loop brings is one change.
            wait_s = max(0.0, self._flushed_at + REPORT_INTERVAL_S - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def flush(self) -> None:
        """Publishes the newest state now."""
        self._flushed_at = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._publish(self.message())

    @property
    def engine(self) -> EngineLoad | None:
        """The engine's last report; None before the first."""
        return self._newest

    def message(self) -> types_pb2.Load:
        """The newest state as a `Load` message."""
        load, fetches = self._newest, self._connector.fetches
        message = types_pb2.Load(
            draining=not self.takes_work,
            asleep=self.asleep,
            model_fingerprint=self.model_fingerprint,
            kv_bytes_sent=self._counters.bytes_sent,
            kv_bytes_received=self._counters.bytes_received,
            num_host_hit_tokens=fetches.num_tokens(Tier.HOST),
            num_disk_hit_tokens=fetches.num_tokens(Tier.DISK),
            num_peer_hit_tokens=fetches.num_tokens(Tier.DEVICE),
            num_blocks_given=self._connector.server.num_given,
            silent_stores=self._connector.nodes.silent,
            resident_bytes=self._resident.num_bytes(time.monotonic()),
        )
        if load is not None:
            # Beyond what running answers are expected to take.
            message.num_free_blocks = max(0, load.num_free_blocks - load.num_growth_blocks)
            message.num_total_blocks = load.num_total_blocks
            message.num_running = load.num_running
            message.num_waiting = load.num_waiting
            message.num_queued_tokens = load.num_queued_tokens
            message.num_cached_blocks = load.num_cached_blocks
            message.num_prompt_tokens = load.num_prompt_tokens
            message.num_prefix_hit_tokens = load.num_prefix_hit_tokens
            message.num_preemptions = load.num_preemptions
            message.num_swapped_out = load.num_swapped_out
            message.num_swapped_in = load.num_swapped_in
            message.num_bad_blocks = load.num_bad_blocks
            message.num_decoding = load.decoding.num_sequences
            message.num_context_tokens = load.decoding.num_context_tokens
            message.num_promised = load.promised.num_sequences
            message.num_promised_tokens = load.promised.num_context_tokens
            message.num_queued_pairs = load.num_queued_pairs
            if load.least_slack_s is not None:
                message.least_slack_s = load.least_slack_s
            if load.step_times is not None:
                message.step_times.CopyFrom(step_times_to_proto(load.step_times))
                message.num_batch_kinds, message.num_chunk_kinds = load.step_kinds
        return message

    def close(self) -> None:
        """Drops a pending report."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
