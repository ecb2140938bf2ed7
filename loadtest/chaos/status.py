"""What several routers say of one cluster, as one status."""

from __future__ import annotations

from collections.abc import Sequence

from shared.rpc.pb.tandem.v1 import inference_pb2

Status = inference_pb2.ClusterStatus


def merged(statuses: Sequence[Status | None]) -> Status | None:
    """Queues and requests are added up; of a worker's reports the one with fewer free blocks counts; it is connected
    where all routers say so. None unless every router answered."""
    told = [status for status in statuses if status is not None]
    if not told or len(told) < len(statuses):
        return None
    whole = Status()
    whole.CopyFrom(told[0])
    for other in told[1:]:
        whole.ready = whole.ready and other.ready
        whole.queue_len += other.queue_len
        whole.degraded.extend(reason for reason in other.degraded if reason not in whole.degraded)
        for mine, theirs in zip(whole.workers, other.workers, strict=True):
            mine.num_requests += theirs.num_requests
            mine.connected = mine.connected and theirs.connected
            if theirs.load.num_free_blocks < mine.load.num_free_blocks:
                mine.load.CopyFrom(theirs.load)
    return whole
