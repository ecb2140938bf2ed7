"""Workers within the router's process: what they answer is written down beforehand, by the request's seed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.router.workers.fleet import Fleet
from shared.errors import TandemError
from shared.identity import DECODE
from shared.kv.layout import LAYOUT_VERSION
from shared.rpc.convert import finish_reason_to_proto, roles_to_proto
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2

LAYOUT = types_pb2.BlockLayout(
    num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32", layout_version=LAYOUT_VERSION
)


@dataclass
class Script:
    """What becomes of a request."""

    token_ids: tuple[int, ...]
    finish: object  # FinishReason; None: the answer never ends by itself
    error: TandemError | None = None
    num_failures: int = 0
    """That number of attempts fail with `error`: every second one behind a few tokens, the others at the prompt."""
    only_at_prompt: bool = False
    num_cached: int = 0


class Workers:
    """All workers of a fleet. Each message is delivered in a turn of its own, so that requests interleave."""

    def __init__(self, fleet: Fleet, scripts: dict[int, Script]) -> None:
        self._scripts = scripts
        self._running: dict[str, asyncio.Task[None]] = {}
        self._reserved: dict[str, worker_pb2.Reserve] = {}
        self._decode_of: dict[str, object] = {}
        for link in fleet.links:
            link._sessions._session = lambda link=link: self._session(link)

    async def _session(self, link) -> None:
        welcome = types_pb2.Welcome(
            worker=types_pb2.WorkerId(name=link.name, incarnation=1),
            layout=LAYOUT,
            num_blocks=4096,
            max_model_len=1000,
            max_num_seqs=8,
            transfer_address=link.name.encode(),
            roles=roles_to_proto(link.roles),
        )
        stream = link._welcomed(welcome)
        while True:
            for command in worker_pb2.Commands.FromString(await stream._outbox.take()).commands:
                self._take(link, command)

    def _take(self, link, command) -> None:
        kind = command.WhichOneof("command")
        body = getattr(command, kind)
        if kind == "reserve":
            self._reserve(link, body)
        elif kind == "submit":
            self._run(body.request_id, self._prefill(link, body))
        elif kind == "cancel":
            task = self._running.pop(body.request_id, None)
            if task is not None:
                task.cancel()

    def _reserve(self, link, reserve) -> None:
        assert link.roles == DECODE
        self._decode_of[reserve.request_id] = link
        reserved = worker_pb2.Reserved(request_id=reserve.request_id, ticket=7, needed_blocks=[0])
        asyncio.get_running_loop().call_soon(link._on_event, worker_pb2.Event(reserved=reserved))

    def _run(self, request_id: str, work) -> None:
        task = self._running[request_id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    async def _prefill(self, link, submit) -> None:
        script = self._scripts[submit.sampling.seed]
        decode = self._decode_of.pop(submit.request_id)
        num_before = len(submit.token_ids) - submit.num_prompt_tokens
        fails = script.num_failures > 0
        script.num_failures -= fails
        if fails and (script.only_at_prompt or script.num_failures % 2 == 0):
            failed = types_pb2.Failed(request_id=submit.request_id, error=to_proto(script.error))
            link._on_event(worker_pb2.Event(failed=failed))
            return
        tokens = self._tokens(script, submit.request_id, num_before, 1)
        tokens.num_cached_tokens = script.num_cached
        link._on_event(worker_pb2.Event(first_token=worker_pb2.FirstToken(tokens=tokens)))
        at = num_before + 1
        while tokens.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED:
            await asyncio.sleep(0)
            if fails and at >= num_before + 3:
                failed = types_pb2.Failed(request_id=submit.request_id, error=to_proto(script.error))
                decode._on_event(worker_pb2.Event(failed=failed))
                return
            tokens = self._tokens(script, submit.request_id, at, 1 + at % 3)
            at += len(tokens.token_ids)
            decode._on_event(worker_pb2.Event(step=worker_pb2.Step(sequences=[tokens])))

    def _tokens(self, script: Script, request_id: str, at: int, count: int) -> types_pb2.SequenceTokens:
        """Some of the answer's tokens; an endless one repeats itself."""
        have = script.token_ids
        if script.finish is None:
            have = have * (2 + (at + count) // len(have))
        end = min(len(have), at + count)
        ended = script.finish is not None and end == len(have)
        reason = finish_reason_to_proto(script.finish) if ended else types_pb2.FINISH_REASON_UNSPECIFIED
        return types_pb2.SequenceTokens(request_id=request_id, token_ids=have[at:end], finish_reason=reason)
