"""The router's hint about the location of a prompt's prefix."""

from __future__ import annotations

from dataclasses import dataclass

from shared.rpc.pb.tandem.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class PrefixHint:
    """From the index, and possibly stale: each holder named is asked what it really has."""

    num_stored_blocks: int | None = None
    """No store node has a block behind this one of the chain; None = not known, all nodes are asked."""
    peers: tuple[tuple[str, int], ...] = ()
    """(host:port, blocks from the first one on) of workers that hold more than this one."""

    @classmethod
    def of(cls, command: worker_pb2.Submit | worker_pb2.Reserve) -> PrefixHint:
        """The hint in a router's command."""
        return cls(
            command.num_stored_blocks if command.HasField("num_stored_blocks") else None,
            tuple((peer.address, peer.num_blocks) for peer in command.peers),
        )
