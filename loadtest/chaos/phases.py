"""When a phase has come, read from the router's status and the streams. No phase is waited for by the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from loadtest.chaos import adapters
from loadtest.chaos.streams import ANSWER_LEN, Streams
from loadtest.chaos.victims import Status
from shared.rpc.pb.tandem.v1 import types_pb2


def reached(phase: str, before: Status, streams: Streams) -> Callable[[Status], bool]:
    """Whether a status shows the phase; `before` is one from before the streams began."""
    num_sent = sum(load.kv_bytes_sent for load in _loads(before, "prefill"))
    num_taken = sum(load.kv_bytes_received for load in _loads(before, "decode"))

    def queued(status: Status) -> bool:
        return status.queue_len > 0

    def prefilling(status: Status) -> bool:
        return any(load.num_running and load.num_queued_tokens for load in _loads(status, "prefill"))

    def shipping(status: Status) -> bool:
        """Blocks have left and not all have come, or more will."""
        sent = sum(load.kv_bytes_sent for load in _loads(status, "prefill")) - num_sent
        taken = sum(load.kv_bytes_received for load in _loads(status, "decode")) - num_taken
        return bool(sent or taken) and (sent != taken or prefilling(status))

    def decoding(_: Status) -> bool:
        return streams.num_answering == len(streams.all) and streams.num_open > 0

    def after_hand_off(status: Status) -> bool:
        """Every request runs on a decode worker, and the prefill workers hold nothing more of it."""
        prefills = [worker for worker in status.workers if worker.worker.name.startswith("prefill")]
        held = sum(worker.num_requests + worker.load.num_running for worker in prefills)
        return decoding(status) and not held and all(len(stream.tokens) > 1 for stream in streams.all)

    def under_late(_: Status) -> bool:
        """Answers of the adapter that will be unloaded have begun, and have far to go."""
        return any(stream.model == adapters.LATE and 0 < len(stream.tokens) < ANSWER_LEN // 2 for stream in streams.all)

    found = {"queued": queued, "prefilling": prefilling, "shipping": shipping, "decoding": decoding}
    found |= {adapters.LOAD: shipping, adapters.JOIN: shipping, adapters.UNLOAD: under_late}
    return {**found, "after-hand-off": after_hand_off}[phase]


def whole(status: Status) -> bool:
    """Every part is there."""
    return (
        status.ready
        and not status.degraded
        and all(worker.connected and not worker.load.draining for worker in status.workers)
    )


def num_held(status: Status) -> int:
    """Blocks that are not free, with the requests that still count."""
    return sum(load.num_total_blocks - load.num_free_blocks for load in _loads(status, "")) + sum(
        worker.num_requests for worker in status.workers
    )


def _loads(status: Status, role: str) -> Iterable[types_pb2.Load]:
    return [worker.load for worker in status.workers if worker.worker.name.startswith(role)]
