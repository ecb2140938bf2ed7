"""`PrefixMatch` as a message and back: each holder once, blocks as indexes into them."""

from __future__ import annotations

from shared.rpc.block_holders import Holder, PrefixMatch, Tier, WorkerRole
from shared.rpc.pb.tandem.v1 import kvstore_pb2, types_pb2


def match_to_proto(match: PrefixMatch) -> kvstore_pb2.MatchResponse:
    """The message; blocks with the same holders, which neighbours mostly have, are converted once."""
    indexes: dict[Holder, int] = {}
    converted: dict[tuple[Holder, ...], kvstore_pb2.BlockHolders] = {}
    blocks: list[kvstore_pb2.BlockHolders] = []
    previous: tuple[Holder, ...] | None = None
    for holders in match.blocks:
        if holders is previous:
            blocks.append(blocks[-1])
            continue
        block = converted.get(holders)
        if block is None:
            numbers = [indexes.setdefault(holder, len(indexes)) for holder in holders]
            block = converted[holders] = kvstore_pb2.BlockHolders(holders=numbers)
        blocks.append(block)
        previous = holders
    return kvstore_pb2.MatchResponse(holders=[_to_proto(holder) for holder in indexes], blocks=blocks)


def match_from_proto(message: kvstore_pb2.MatchResponse) -> PrefixMatch:
    """What `match_to_proto` was given. Raises ValueError or IndexError for a message that is no answer of ours."""
    holders = [_from_proto(holder) for holder in message.holders]
    blocks: list[tuple[Holder, ...]] = []
    previous: kvstore_pb2.BlockHolders | None = None
    for block in message.blocks:
        if block == previous:  # in C, where reading the numbers is not
            blocks.append(blocks[-1])
            continue
        blocks.append(tuple(holders[number] for number in block.holders))
        previous = block
    return PrefixMatch(tuple(blocks))


def _to_proto(holder: Holder) -> kvstore_pb2.Holder:
    return kvstore_pb2.Holder(
        worker=types_pb2.WorkerId(name=holder.worker_name, incarnation=holder.incarnation),
        role=types_pb2.WorkerRole.ValueType(holder.role),
        tier=kvstore_pb2.Tier.ValueType(holder.tier),
    )


def _from_proto(message: kvstore_pb2.Holder) -> Holder:
    worker = message.worker
    return Holder(worker.name, worker.incarnation, WorkerRole(message.role), Tier(message.tier))
