"""Reports a worker's load to its routers: the newest state, at most once an interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.worker.blocks.connector import KVConnector
from services.worker.telemetry.resident import ResidentMemory
from shared.engine.messages import EngineLoad
from shared.kv.transfer import TransferCounters
from shared.kv_index.holders import Tier
from shared.rpc.convert import step_times_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2

REPORT_INTERVAL_S = 0.005
"""Several steps' changes within this time make one report."""


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
        self._resident = ResidentMemory()
        self.draining = False

    def update(self, load: EngineLoad) -> None:
        """Takes a new state; it is published within REPORT_INTERVAL_S."""
        self._newest = load
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Publishes the newest state now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._publish(self.message())

    @property
    def engine(self) -> EngineLoad | None:
        """What the engine reported last."""
        return self._newest

    def message(self) -> types_pb2.Load:
        """The newest state as a `Load` message."""
        load, fetches = self._newest, self._connector.fetches
        message = types_pb2.Load(
            draining=self.draining,
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
            message.num_queued_pairs = load.num_queued_pairs
            if load.least_slack_s is not None:
                message.least_slack_s = load.least_slack_s
            if load.step_times is not None:
                message.step_times.CopyFrom(step_times_to_proto(load.step_times))
        return message

    def close(self) -> None:
        """Drops a pending report."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
