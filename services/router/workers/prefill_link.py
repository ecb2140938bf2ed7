"""The router's session with a prefill worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import grpc.aio

from services.router.workers.link import WorkerLink
from shared.identity import WorkerRole
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)


class PrefillLink(WorkerLink[prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvent]):
    """Sends Submit and Cancel; receives a FirstToken for each prompt."""

    role = WorkerRole.PREFILL

    def submit(self, submit: prefill_pb2.Submit, token_ids: Iterable[int]) -> None:
        """Starts a prompt of these tokens on the worker; raises WorkerLost."""
        command = prefill_pb2.PrefillCommand(submit=submit)
        command.submit.token_ids.extend(token_ids)
        self._give(submit.request_id, command)

    def cancel(self, request_id: str, *, receiver: str = "") -> None:
        """Ends a request on the worker; nothing to do where it is lost. `receiver`: the decode worker that is there and
        takes what is sent, empty where it is gone; see proto Cancel."""
        if self.connected:
            cancel = types_pb2.Cancel(request_id=request_id, peer_active=bool(receiver), peer=receiver)
            if receiver:
                self._waits_for.add(receiver)
            self.send(prefill_pb2.PrefillCommand(cancel=cancel))

    def _open_stream(
        self, link: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamCall[prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvent]:
        return prefill_pb2_grpc.PrefillServiceStub(link).Session(metadata=self._metadata)

    def _hello(self, hello: types_pb2.Hello) -> prefill_pb2.PrefillCommand:
        return prefill_pb2.PrefillCommand(hello=hello)

    def _heartbeat(self, beat: types_pb2.Heartbeat) -> prefill_pb2.PrefillCommand:
        return prefill_pb2.PrefillCommand(heartbeat=beat)

    def _peer_lost(self, lost: types_pb2.PeerLost) -> prefill_pb2.PrefillCommand:
        return prefill_pb2.PrefillCommand(peer_lost=lost)

    def _take_over(self, taken: types_pb2.TakeOver) -> prefill_pb2.PrefillCommand:
        return prefill_pb2.PrefillCommand(take_over=taken)

    def _drain(self, *, undo: bool) -> prefill_pb2.PrefillCommand:
        if undo:
            return prefill_pb2.PrefillCommand(undrain=types_pb2.Undrain())
        return prefill_pb2.PrefillCommand(drain=types_pb2.Drain())

    def _on_event(self, event: prefill_pb2.PrefillEvent) -> None:
        match event.WhichOneof("event"):
            case "first_token":
                self._deliver(event.first_token.tokens.request_id, event.first_token)
            case "failed":
                self._deliver(event.failed.request_id, from_proto(event.failed.error))
            case "load":
                self._on_load(event.load)
            case "heartbeat":
                self._on_heartbeat(event.heartbeat)
            case None:
                pass  # an event that this version does not know
            case other:
                logger.warning("worker %s sent %s in mid-session", self.name, other)
