"""Every step's plan as one packed message from the leader to the followers, which compute it in lockstep.

A message is a header (what it is, and the version) and msgpack of the tuples below, which msgspec writes and checks. A
sequence of the plan before is named by its place there, and only the blocks behind those of then are sent; its sampling
settings are left out where they are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.interface import Collectives
from shared.engine.plan import BlockCopy, PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner.runner import Runner
from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, ModelMismatch, TransferFailed
from shared.kernels.lora.step import PackedAdapter

VERSION = 6
"""Version of the message, raised with every change of its fields. Both ends must have the same one."""

_HEADER = struct.Struct("<4sH")  # magic, version
_MAGIC = b"TPLN"
_PLACING = struct.Struct("<4sIQ")  # magic, slot, number of the adapter or 0
_PLACES = b"TADP"
_ENCODER = msgspec.msgpack.Encoder()
_END = b""


class _Sample(NamedTuple):
    """A SampleSpec."""

    params: SamplingParams | None  # None: as in the plan before, or in the sample before this one
    position: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]


class _Sequence(NamedTuple):
    """A PlannedSequence, as what changed since the plan before."""

    before: int | str  # its place in the plan before; the id of a sequence that was not in it
    num_kept_blocks: int  # all of the plan before, or none
    new_block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    start: int
    num_prompt_tokens: int
    samples: tuple[_Sample, ...]
    pending: int | None
    targets: tuple[int, ...]
    num_alternatives: int
    adapter: int
    guess_states: tuple[int, ...]


class _Plan(NamedTuple):
    sequences: tuple[_Sequence, ...]
    copies: tuple[BlockCopy, ...]


_PLANS = msgspec.msgpack.Decoder(_Plan)


class PlanEncoder:
    """Encodes the plans of one runner, in their order. Its messages are for decoders that have seen all before."""

    def __init__(self) -> None:
        self._before: tuple[PlannedSequence, ...] = ()

    def encode(self, plan: StepPlan) -> bytes:
        """The next plan as one message."""
        places = {item.sequence_id: place for place, item in enumerate(self._before)}
        message = _Plan(tuple([self._sequence(item, places) for item in plan.sequences]), plan.copies)
        self._before = plan.sequences
        return _HEADER.pack(_MAGIC, VERSION) + _ENCODER.encode(message)

    def _sequence(self, item: PlannedSequence, places: dict[str, int]) -> _Sequence:
        place, num_kept, known = places.get(item.sequence_id), 0, None
        if place is not None:
            before = self._before[place]
            known = before.samples[0].params if before.samples else None
            if item.block_ids[: len(before.block_ids)] == before.block_ids:
                num_kept = len(before.block_ids)
        samples = []
        for sample in item.samples:
            samples.append(_Sample(None if sample.params is known else sample.params, *sample[1:]))
            known = sample.params
        return _Sequence(
            item.sequence_id if place is None else place,
            num_kept,
            item.block_ids[num_kept:],
            item.token_ids,
            item.start,
            item.num_prompt_tokens,
            tuple(samples),
            item.pending,
            item.targets,
            item.num_alternatives,
            item.adapter,
            item.guess_states,
        )


class PlanDecoder:
    """Decodes the messages of one encoder, in their order from its first one on."""

    def __init__(self) -> None:
        self._before: tuple[PlannedSequence, ...] = ()

    def decode(self, data: bytes) -> StepPlan:
        """The next plan. Raises ModelMismatch for a message of another version, TransferFailed for bytes that are no
        plan, or not the next one."""
        try:
            plan = self._decode(_PLANS.decode(_content(data)))
        except (ValueError, struct.error, InvalidRequest) as error:
            raise TransferFailed(f"these bytes are no plan of a step: {error}") from error
        self._before = plan.sequences
        return plan

    def _decode(self, message: _Plan) -> StepPlan:
        return StepPlan(tuple([self._sequence(item) for item in message.sequences]), message.copies)

    def _sequence(self, item: _Sequence) -> PlannedSequence:
        name, block_ids, known = item.before, item.new_block_ids, None
        if isinstance(name, int):
            if not 0 <= name < len(self._before):
                raise ValueError(f"it continues sequence {name} of {len(self._before)} in the plan before")
            before = self._before[name]
            name, known = before.sequence_id, before.samples[0].params if before.samples else None
            if item.num_kept_blocks:
                block_ids = before.block_ids + block_ids
        if item.num_kept_blocks != len(block_ids) - len(item.new_block_ids):
            raise ValueError(f"it continues a block table of {item.num_kept_blocks} blocks, which is not known")
        samples = []
        for sample in item.samples:
            known = sample.params or known
            if known is None:
                raise ValueError("its sampling settings are not known")
            samples.append(SampleSpec(known, *sample[1:]))
        return PlannedSequence(
            name,
            item.token_ids,
            item.start,
            block_ids,
            item.num_prompt_tokens,
            tuple(samples),
            item.pending,
            item.targets,
            item.num_alternatives,
            adapter=item.adapter,
            guess_states=item.guess_states,
        )


def _content(data: bytes) -> memoryview:
    """The content behind a message's header. Raises ModelMismatch, ValueError."""
    magic, version = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    if version != VERSION:
        raise ModelMismatch(f"a plan of version {version}, this build reads {VERSION}", field="version")
    return memoryview(data)[_HEADER.size :]


class PlanAnnouncer:
    """The leader's side. Called by one thread, before it computes its own part of the step."""

    def __init__(self, everyone: Collectives, check: Callable[[], None] = lambda: None) -> None:
        """`check`: raises RankLost where a rank is known to be gone."""
        self._everyone = everyone
        self.check = check
        self._encoder = PlanEncoder()

    def __call__(self, plan: StepPlan) -> None:
        """Sends the plan; does not wait until it is read. Raises RankLost."""
        broadcast_bytes(self._everyone, self._encoder.encode(plan))

    def place_adapter(self, slot: int, number: int) -> None:
        """See `Announcer`."""
        broadcast_bytes(self._everyone, _PLACING.pack(_PLACES, slot, number))

    def close(self) -> None:
        """Ends the followers: no plan follows. Raises RankLost."""
        broadcast_bytes(self._everyone, _END)


def _no_adapter(number: int) -> PackedAdapter:
    raise TransferFailed(f"adapter {number} is to be placed, and this rank reads none")


def follow(everyone: Collectives, runner: Runner, take_adapter: Callable[[int], PackedAdapter] = _no_adapter) -> None:
    """A follower's steps, until the leader ends them. `take_adapter` gives this rank's part of an adapter by the number
    of its load. Raises RankLost, and as `PlanDecoder.decode`."""
    decoder = PlanDecoder()
    with torch.inference_mode():
        while (message := broadcast_bytes(everyone)) != _END:
            if message.startswith(_PLACES) and len(message) == _PLACING.size:
                _, slot, number = _PLACING.unpack(message)
                runner.place_adapter(slot, take_adapter(number) if number else None)
            else:
                runner.follow(decoder.decode(message))
