"""`PrefixMatch` as a message and back: each holder once, runs of blocks with the same holders as indexes into them."""

from __future__ import annotations

from itertools import groupby

from shared.kv_index.holders import Holder, PrefixMatch, Tier
from shared.rpc.convert import role_from_proto, role_to_proto
from shared.rpc.pb.tandem.v1 import kvstore_pb2, types_pb2


def match_to_proto(match: PrefixMatch) -> kvstore_pb2.MatchResponse:
    """The message. Adjacent blocks with the same holders, which is common, become one entry."""
    indexes: dict[Holder, int] = {}
    runs = [
        kvstore_pb2.BlockHolders(
            holders=[indexes.setdefault(holder, len(indexes)) for holder in holders], num_blocks=sum(1 for _ in run)
        )
        for holders, run in groupby(match.blocks)
    ]
    return kvstore_pb2.MatchResponse(holders=[_to_proto(holder) for holder in indexes], blocks=runs)


def match_from_proto(message: kvstore_pb2.MatchResponse, max_blocks: int) -> PrefixMatch:
    """The inverse of `match_to_proto`, for a request of `max_blocks` blocks.

    Raises ValueError or IndexError for a malformed message.
    """
    holders = [_from_proto(holder) for holder in message.holders]
    blocks: list[tuple[Holder, ...]] = []
    for run in message.blocks:
        if not run.num_blocks or not run.holders:
            raise ValueError("a run without blocks or without holders")
        if len(blocks) + run.num_blocks > max_blocks:
            raise ValueError(f"more than the {max_blocks} requested blocks")
        blocks += [tuple(holders[number] for number in run.holders)] * run.num_blocks
    return PrefixMatch(tuple(blocks))


def _to_proto(holder: Holder) -> kvstore_pb2.Holder:
    return kvstore_pb2.Holder(
        worker=types_pb2.WorkerId(name=holder.worker_name, incarnation=holder.incarnation),
        role=role_to_proto(holder.role),
        tier=kvstore_pb2.Tier.ValueType(holder.tier),
    )


def _from_proto(message: kvstore_pb2.Holder) -> Holder:
    worker = message.worker
    return Holder(worker.name, worker.incarnation, role_from_proto(message.role), Tier(message.tier))
