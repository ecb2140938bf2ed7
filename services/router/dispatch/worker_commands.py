"""The commands that begin one attempt's sequences on workers; tokens are added where they are sent."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.dispatch.active_request import ActiveRequest
from shared.rpc.convert import sampling_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2


class AttemptCommands:
    """Makes them from the request as it is at that time."""

    def __init__(self, active: ActiveRequest, weights: int = 0) -> None:
        """`weights`: which the workers must have, see proto Submit; 0: any."""
        self._weights = weights
        self._active = active
        self._request = active.request
        self._sampling = sampling_to_proto(active.request.sampling)
        self._salt = active.request.chain_salt
        if self._request.sampling.prompt_logprobs is not None:
            self._salt += f"\0attempt={active.wire_id}"  # what an earlier attempt left is no prefix: all is computed

    def reserve(self, decode: str, *, prefill_here: bool) -> worker_pb2.Reserve:
        """The command to the decode worker of that name, which computes the prompt itself or awaits its blocks."""
        peers = self._peers(decode) if prefill_here else []
        stored = self._active.hits.num_stored_blocks
        return self._reserve(self._active.wire_id, prefill_here=prefill_here, num_stored_blocks=stored, peers=peers)

    def submit(
        self, sender_id: str, prefill: str, transfer_address: bytes, reserved: worker_pb2.Reserved
    ) -> worker_pb2.Submit:
        """The command to the prefill worker of that name. `transfer_address`: of the decode worker, which answered
        `reserved`."""
        return worker_pb2.Submit(
            request_id=sender_id,
            num_prompt_tokens=self._request.num_prompt_tokens,
            sampling=self._sampling,
            salt=self._salt,
            tenant=self._request.tenant,
            ticket=reserved.ticket,
            transfer_address=transfer_address,
            needed_blocks=reserved.needed_blocks,
            traceparent=self._active.record.traceparent(following=True),
            num_stored_blocks=self._active.hits.num_stored_blocks,
            peers=self._peers(prefill),
            notes=reserved.reassignable,
            unpack_bytes_s=reserved.unpack_bytes_s,
            priority=min(0, self._request.priority),
            retain_s=self._request.retain_s,
            session=self._request.session,
            adapter=self._request.adapter,
            weights=self._weights,
        )

    def go_on(self, name: str) -> worker_pb2.Reserve:
        """For a decode worker to which the running answer moves, under that name. No store node is asked: who has the
        answer has all its blocks."""
        command = self._reserve(name, prefill_here=True, num_stored_blocks=0)
        command.sampling.ClearField("prompt_logprobs")  # the client has them
        return command

    def _reserve(
        self,
        name: str,
        *,
        prefill_here: bool,
        num_stored_blocks: int | None,
        peers: Sequence[types_pb2.PrefixHolder] = (),
    ) -> worker_pb2.Reserve:
        return worker_pb2.Reserve(
            request_id=name,
            num_prompt_tokens=self._request.num_prompt_tokens,
            sampling=self._sampling,
            salt=self._salt,
            tenant=self._request.tenant,
            prefill_here=prefill_here,
            traceparent=self._active.record.traceparent(),
            num_stored_blocks=num_stored_blocks,
            peers=peers,
            priority=min(0, self._request.priority),
            retain_s=self._request.retain_s,
            session=self._request.session,
            next_turn_s=self._request.next_turn_s,
            adapter=self._request.adapter,
            weights=self._weights,
        )

    def _peers(self, name: str) -> list[types_pb2.PrefixHolder]:
        """Peers that the worker of this name may fetch the prefix from."""
        peers = self._active.hits.peers_of(name)
        return [types_pb2.PrefixHolder(address=peer.address, num_blocks=peer.num_blocks) for peer in peers]
