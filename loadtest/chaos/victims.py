"""From a trial's victim to the parts that play it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.rpc.pb.tandem.v1 import inference_pb2

Status = inference_pb2.ClusterStatus


def merged(statuses: Sequence[Status | None]) -> Status | None:
    """Queues and requests are added up; of a worker's reports the one with fewer free blocks counts; it is connected
    where all routers say so. None unless every router answered."""
    answered = [status for status in statuses if status is not None]
    if not answered or len(answered) < len(statuses):
        return None
    whole = Status()
    whole.CopyFrom(answered[0])
    for other in answered[1:]:
        whole.ready = whole.ready and other.ready
        whole.queue_len += other.queue_len
        whole.degraded.extend(reason for reason in other.degraded if reason not in whole.degraded)
        for mine, theirs in zip(whole.workers, other.workers, strict=True):
            mine.num_requests += theirs.num_requests
            mine.connected = mine.connected and theirs.connected
            if theirs.load.num_free_blocks < mine.load.num_free_blocks:
                mine.load.CopyFrom(theirs.load)
    return whole


PEERS = ("prefill-0", "decode-0")
"""In trials of the fetch peer these get no prompts: they hold the prefixes that the others fetch."""
PARTS = ("router", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore", "store-1", "redis")
_OF_KIND = {
    "router": ("router", "router-1"),
    "prefill": ("prefill-0", "prefill-1"),
    "decode": ("decode-0", "decode-1"),
    "store": ("kvstore", "store-1"),
    "peer": PEERS,
}


def parts_of(victim: str, status: Status) -> list[str]:
    """The parts that the fault strikes. Of several workers the one with the most requests is the victim; of the peers
    the prefill worker, of the routers the first."""
    if victim.endswith("-pool"):
        return list(_OF_KIND[victim.removesuffix("-pool")])
    return [_one(part, status) for part in victim.split("+")]


def may_be(victim: str) -> set[str]:
    """All parts that the fault may strike, whatever the status."""
    if victim.endswith("-pool"):
        return set(_OF_KIND[victim.removesuffix("-pool")])
    chosen = ("prefill", "decode")
    return {name for part in victim.split("+") for name in (_OF_KIND[part] if part in chosen else (_fixed(part),))}


def cut_pairs(victim: str, status: Status) -> list[tuple[str, str]]:
    """What a partition separates, as (sender, receiver) in the direction that is cut first: both sides of a link, or a
    part from all others."""
    if "~" not in victim:
        part = _place(_one(victim, status))
        return [(part, _place(other)) for other in PARTS if _place(other) != part]
    sender, receiver = victim.split("~")
    cut = _one(sender, status)
    return [(cut, other) for other in _OF_KIND[receiver] if other != cut]


def one_pair(victim: str, status: Status) -> tuple[str, str]:
    """The worker with the most requests on each side of a link."""
    sender, receiver = victim.split("~")
    return _one(sender, status), _one(receiver, status)


def _one(victim: str, status: Status) -> str:
    if victim in ("prefill", "decode"):
        pool: Sequence[str] = _OF_KIND[victim]
        workers = [worker for worker in status.workers if worker.worker.name in pool]
        return max(workers, key=lambda worker: worker.num_requests).worker.name
    return _fixed(victim)


def _fixed(victim: str) -> str:
    return {"peer": PEERS[0], "store": "store-1"}.get(victim, victim)


def _place(part: str) -> str:
    """The part's name in its network."""
    return "valkey" if part == "redis" else part
