"""The router's session with a decode worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import grpc.aio

from services.router.workers.link import WorkerLink
from shared.identity import WorkerRole
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import decode_pb2, decode_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)


class DecodeLink(WorkerLink[decode_pb2.DecodeCommand, decode_pb2.DecodeEvent]):
    """Sends Reserve and Cancel; receives one Step for each engine step, with new tokens of all of this router's
    sequences."""

    role = WorkerRole.DECODE

    def reserve(self, reserve: decode_pb2.Reserve, token_ids: Iterable[int]) -> Iterable[int]:
        """Starts a sequence of these tokens on the worker; raises WorkerLost. Returns the tokens as the message's own
        repeated field, which another message copies in one go."""
        command = decode_pb2.DecodeCommand(reserve=reserve)
        command.reserve.token_ids.extend(token_ids)
        self._give(reserve.request_id, command)
        return command.reserve.token_ids

    def cancel(self, request_id: str, *, sender: str = "") -> None:
        """Ends a request on the worker; nothing to do where it is lost. `sender`: the prefill worker that is there and
        will end the hand-off by its trailer, empty where there is none; see proto Cancel."""
        if self.connected:
            cancel = types_pb2.Cancel(request_id=request_id, peer_active=bool(sender), peer=sender)
            if sender:
                self._waits_for.add(sender)
            self.send(decode_pb2.DecodeCommand(cancel=cancel))

    def reassign(self, reassign: decode_pb2.Reassign) -> None:
        """Another prefill worker is to serve a reservation of this worker, which answers with a Reserved. Raises
        WorkerLost."""
        self.send(decode_pb2.DecodeCommand(reassign=reassign))

    def _open_stream(
        self, link: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[decode_pb2.DecodeCommand, decode_pb2.DecodeEvent]:
        return decode_pb2_grpc.DecodeServiceStub(link).Session(metadata=self._metadata)

    def _hello(self, hello: types_pb2.Hello) -> decode_pb2.DecodeCommand:
        return decode_pb2.DecodeCommand(hello=hello)

    def _heartbeat(self, beat: types_pb2.Heartbeat) -> decode_pb2.DecodeCommand:
        return decode_pb2.DecodeCommand(heartbeat=beat)

    def _peer_lost(self, lost: types_pb2.PeerLost) -> decode_pb2.DecodeCommand:
        return decode_pb2.DecodeCommand(peer_lost=lost)

    def _take_over(self, taken: types_pb2.TakeOver) -> decode_pb2.DecodeCommand:
        return decode_pb2.DecodeCommand(take_over=taken)

    def _drain(self, *, undo: bool) -> decode_pb2.DecodeCommand:
        if undo:
            return decode_pb2.DecodeCommand(undrain=types_pb2.Undrain())
        return decode_pb2.DecodeCommand(drain=types_pb2.Drain())

    def _on_event(self, event: decode_pb2.DecodeEvent) -> None:
        match event.WhichOneof("event"):
            case "step":
                for sequence in event.step.sequences:
                    self._deliver(sequence.request_id, sequence)
            case "reserved":
                self._acknowledged(event.reserved.request_id)
                self._deliver(event.reserved.request_id, event.reserved)
            case "failed":
                self._deliver(event.failed.request_id, from_proto(event.failed.error))
            case "load":
                self._on_load(event.load)
            case "heartbeat":
                self._on_heartbeat(event.heartbeat)
            case other:
                logger.warning("worker %s sent %s in mid-session", self.name, other)
