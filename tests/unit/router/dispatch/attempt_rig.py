"""An attempt between links that record their commands, without a network."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from services.router.dispatch.active_request import ActiveRequest, WriteCoalescer
from services.router.dispatch.attempt import Attempt
from services.router.dispatch.request import Request
from services.router.placement.cut_pairs import CutPairs
from services.router.placement.decision import Choice
from services.router.placement.prediction import Reliability
from services.router.placement.views import PrefixHits, PrefixPeer, Tier, Work
from shared.engine.sampling_params import SamplingParams
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

PROMPT = tuple(range(100))
AHEAD = Work(70, 7.0)


class Link:
    """Keeps the calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = f"{name}:1"
        self.queued = AHEAD
        self.connected = True
        self.welcome: object = SimpleNamespace(transfer_address=b"at " + name.encode(), model_fingerprint="f")
        self.calls: list[tuple[Any, ...]] = []
        self.sent: list[Any] = []
        self.reserved: list[list[int]] = []

    def open(
        self, request_id: str, receive: object, work: Work, *, num_blocks: int, num_answer_tokens: int = 0
    ) -> None:
        self.calls.append(("open", request_id, work, num_blocks))

    def close(self, request_id: str) -> None:
        self.calls.append(("close", request_id))

    def cancel(self, request_id: str, **peer: str) -> None:
        self.calls.append(("cancel", request_id, peer))

    def tier_of(self, adapter: str) -> Tier:
        return Tier.READY if adapter else Tier.FOLDER

    def computed(self, request_id: str) -> None:
        self.calls.append(("computed", request_id))

    def refused(self) -> None:
        self.calls.append(("refused",))

    def reserve(self, message: Any, token_ids: Any) -> Any:
        self.sent.append(message)
        self.reserved.append(list(token_ids))
        return token_ids

    def submit(self, message: Any, token_ids: Any) -> None:
        self.sent.append((message, list(token_ids)))


class Predictor:
    """Keeps what it observes."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.hand_offs_s: list[float] = []
        self.gaps_s: list[float] = []
        self.ttft = Reliability()

    def observe_here(self, *seen: Any) -> None:
        self.seen.append(("here", *seen))

    def observe_prefill(self, *seen: Any) -> None:
        self.seen.append(("prefill", *seen))

    def observe_gap(self, seconds: float) -> None:
        self.gaps_s.append(seconds)

    def observe_hand_off(self, seconds: float) -> None:
        self.hand_offs_s.append(seconds)


async def no_one_is_waited_for() -> None:
    """`Fleet.heard` where every worker was heard from."""


class Rig:
    """One attempt of one request."""

    def __init__(self, *, collocated: bool = False, timeout_s: float = 100.0, **sampling: Any) -> None:
        params = SamplingParams(**{"seed": 1, "max_tokens": 8, **sampling})
        self.active = ActiveRequest(Request("r", PROMPT, params), WriteCoalescer())
        self.active.begin_attempt()
        peers = (PrefixPeer("p0", "p0:1", 3), PrefixPeer("d0", "d0:1", 2))
        self.active.hits = PrefixHits({"p0": 48, "d0": 32}, peers=peers)
        self.active.record.choices.append(Choice("d0", None if collocated else "p0"))
        self.decode, self.prefill, self.predictor = Link("d0"), Link("p0"), Predictor()
        links: Any = (self.decode, None if collocated else self.prefill)
        parts: Any = (self.predictor, timeout_s, lambda *_: None, no_one_is_waited_for, CutPairs())
        self.attempt = Attempt(self.active, *links, *parts)
        self.running = asyncio.create_task(self.attempt.run())

    def decoded(self, *token_ids: int, **fields: Any) -> None:
        self.attempt.receive(self.decode, types_pb2.SequenceTokens(token_ids=token_ids, **fields))  # type: ignore[arg-type]

    def prefilled(self, *token_ids: int, **fields: Any) -> None:
        tokens = types_pb2.SequenceTokens(token_ids=token_ids, **fields)
        self.attempt.receive(self.prefill, worker_pb2.FirstToken(tokens=tokens))  # type: ignore[arg-type]

    def reserved(self) -> None:
        self.attempt.receive(self.decode, worker_pb2.Reserved(ticket=7, needed_blocks=[1, 2]))  # type: ignore[arg-type]

    async def submitted(self) -> None:
        await asyncio.sleep(0)  # `run` begins
        if self.attempt._prefill is not None:
            self.reserved()

    async def ended(self) -> BaseException | None:
        """What the attempt ended with; gives up the request."""
        async with asyncio.timeout(60):
            [error] = await asyncio.gather(self.running, return_exceptions=True)
        self.attempt.release()
        return error
