"""Between messages and the plain types inside. Each conversion happens once, at the edge of a process."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, cast, get_args

from shared.engine.finish_reason import FinishReason
from shared.engine.plan import SampledToken
from shared.engine.sampling_params import (
    AUTO,
    DEFAULT_SPECULATION,
    MOST_GUESSES,
    BeamSearch,
    EarlyStopping,
    Pooling,
    SamplingParams,
    Speculation,
)
from shared.errors import InvalidRequest
from shared.identity import Roles, WorkerRole, roles_text
from shared.kv.groups import KVGroups
from shared.kv.layout import LAYOUT_VERSION, BlockLayout, KVFormat
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from shared.sizing.step_time import StepTimes
from shared.structure.structured_output import ReasoningPart, StructuredOutput, StructureKind

_OptionalName = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
]
_OPTIONAL: tuple[_OptionalName, ...] = get_args(_OptionalName)
_optional_values = attrgetter(*_OPTIONAL)

_FINISH_TO_PROTO: dict[FinishReason | None, types_pb2.FinishReason.ValueType] = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}


_POOLING_TO_PROTO: dict[Pooling, types_pb2.Pooling.ValueType] = {
    "last": types_pb2.POOLING_LAST,
    "mean": types_pb2.POOLING_MEAN,
}
_POOLING_FROM_PROTO: dict[int, Pooling] = {number: pooling for pooling, number in _POOLING_TO_PROTO.items()}

_ROLE_TO_PROTO = {
    WorkerRole.PREFILL: types_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: types_pb2.WORKER_ROLE_DECODE,
    WorkerRole.STORE: types_pb2.WORKER_ROLE_STORE,
}
_ROLE_FROM_PROTO: dict[int, WorkerRole] = {number: role for role, number in _ROLE_TO_PROTO.items()}


def role_to_proto(role: WorkerRole) -> types_pb2.WorkerRole.ValueType:
    """The number, also that of the index's records."""
    return _ROLE_TO_PROTO[role]


def role_from_proto(number: int) -> WorkerRole:
    """Raises ValueError for a number that is no role."""
    role = _ROLE_FROM_PROTO.get(number)
    if role is None:
        raise ValueError(f"{number} is no worker role")
    return role


def roles_to_proto(roles: Roles) -> list[types_pb2.WorkerRole.ValueType]:
    """The numbers, in their order."""
    return sorted(map(role_to_proto, roles))


def roles_from_proto(numbers: Iterable[int]) -> Roles:
    """Without numbers that this build does not know."""
    return frozenset(_ROLE_FROM_PROTO[number] for number in numbers if number in _ROLE_FROM_PROTO)


def worker_roles(worker: inference_pb2.WorkerStatus) -> str:
    """`prefill`, `decode` or `prefill,decode`, for people."""
    return roles_text(roles_from_proto(worker.roles or (worker.role,)))


def finish_reason_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    """UNSPECIFIED for None: the request is unfinished."""
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(number: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for UNSPECIFIED, and for a number that this build does not know."""
    return _FINISH_FROM_PROTO.get(number)


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Absent fields take their defaults. Raises InvalidRequest naming the field that is out of bounds."""
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(
        **given,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_sequences=tuple(tuple(bad.token_ids) for bad in message.bad_sequences),
        structured_output=structure_from_proto(message.structured_output)
        if message.HasField("structured_output")
        else None,
        speculation=speculation_from_proto(message.speculation)
        if message.HasField("speculation")
        else DEFAULT_SPECULATION,
        pooling=_POOLING_FROM_PROTO.get(message.pooling, ""),
        beams=_beams_from_proto(message.beams) if message.HasField("beams") else None,
    )


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """For a worker: stop strings stay behind, they are the router's to find."""
    optional = dict(zip(_OPTIONAL, _optional_values(params), strict=True))  # protobuf leaves a field of None absent
    message = types_pb2.SamplingParams(min_tokens=params.min_tokens, ignore_eos=params.ignore_eos, **optional)
    # What a request rarely has costs nothing where it does not.
    if params.stop_token_ids:
        message.stop_token_ids.extend(params.stop_token_ids)
    if params.logit_bias:
        message.logit_bias.update(params.logit_bias)
    for bad in params.bad_sequences:
        message.bad_sequences.add(token_ids=bad)
    if params.pooling:
        message.pooling = _POOLING_TO_PROTO[params.pooling]
    if params.beams is not None:
        message.beams.width, message.beams.num_answers = params.beams.width, params.beams.num_answers
        message.beams.length_penalty = params.beams.length_penalty
        message.beams.early_stopping = params.beams.early_stopping
    if params.structured_output:
        message.structured_output.CopyFrom(structure_to_proto(params.structured_output))
    if params.speculation != DEFAULT_SPECULATION:
        message.speculation.method = params.speculation.method
        message.speculation.max = params.speculation.most_guesses
    return message


def _beams_from_proto(message: types_pb2.BeamSearch) -> BeamSearch:
    stopping = cast(EarlyStopping, message.early_stopping)  # which the class checks
    return BeamSearch(message.width, message.num_answers, message.length_penalty, stopping)


def speculation_from_proto(message: types_pb2.Speculation) -> Speculation:
    """Absent fields take their defaults. Raises InvalidRequest naming the field."""
    return Speculation(message.method or AUTO, message.max or MOST_GUESSES)


def structure_from_proto(message: types_pb2.StructuredOutput) -> StructuredOutput:
    """Raises InvalidRequest where none is given, and naming the field that is out of bounds."""
    name = message.WhichOneof("kind")
    if name is None or (name == "json_object" and not message.json_object):
        kinds = ", ".join(kind.value for kind in StructureKind)
        raise InvalidRequest(f"structured_output must hold one of {kinds}", field="structured_output", limit=kinds)
    kind, reasoning = StructureKind(name), None
    if message.HasField("reasoning"):
        reasoning = ReasoningPart(message.reasoning.begin, message.reasoning.end, message.reasoning.is_open)
    if kind is StructureKind.CHOICE:
        return StructuredOutput(kind, choices=tuple(message.choice.values), reasoning=reasoning)
    text = "" if kind is StructureKind.JSON_OBJECT else getattr(message, name)
    return StructuredOutput(kind, text, reasoning=reasoning)


def structure_to_proto(structure: StructuredOutput) -> types_pb2.StructuredOutput:
    """Inverse of `structure_from_proto`."""
    message = types_pb2.StructuredOutput()
    if structure.kind is StructureKind.JSON_OBJECT:
        message.json_object = True
    elif structure.kind is StructureKind.CHOICE:
        message.choice.values.extend(structure.choices)
    else:
        setattr(message, structure.kind.value, structure.text)
    if structure.reasoning is not None:
        message.reasoning.begin = structure.reasoning.begin
        message.reasoning.end = structure.reasoning.end
        message.reasoning.is_open = structure.reasoning.is_open
    return message


def layout_to_proto(layout: BlockLayout) -> types_pb2.BlockLayout:
    """The layout with this build's layout version."""
    return types_pb2.BlockLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.format.num_kv_heads,
        head_dim=layout.format.head_dim,
        block_size=layout.block_size,
        dtype=layout.format.dtype,
        layout_version=LAYOUT_VERSION,
        num_planes=layout.format.num_planes,
        windows=[] if layout.groups.is_plain else [window or 0 for window in layout.windows],
        num_states=layout.num_states,
        source_dtype=layout.format.source,
        sent_dtype=layout.format.sent,
    )


def layout_from_proto(message: types_pb2.BlockLayout) -> BlockLayout:
    """The layout without its version, which the caller compares."""
    return BlockLayout(
        num_layers=message.num_layers,
        block_size=message.block_size,
        format=KVFormat(
            message.dtype,
            message.num_kv_heads,
            message.head_dim,
            message.num_planes or 2,
            message.source_dtype,
            message.sent_dtype,
        ),
        windows=tuple(window or None for window in message.windows) or (None,),
        num_states=message.num_states,
    )


def groups_of(worker: inference_pb2.WorkerStatus) -> KVGroups:
    """KV groups of a worker; a plain one where it comes from an earlier router, which does not say."""
    if worker.HasField("layout"):
        return layout_from_proto(worker.layout).groups
    return KVGroups(max(1, worker.block_size))


def step_times_to_proto(times: StepTimes) -> types_pb2.StepTimes:
    """Step times of one rank and without experts, as workers fit them: the other coefficients are not sent."""
    return types_pb2.StepTimes(
        fixed_s=times.fixed_s,
        read_s=times.read_s,
        token_s=times.token_s,
        sequence_s=times.sequence_s,
        kv_s=times.kv_s,
        attention_s=times.attention_s,
        overlap=times.overlap,
    )


def step_times_from_proto(message: types_pb2.StepTimes) -> StepTimes:
    """The inverse of `step_times_to_proto`."""
    return StepTimes(
        message.fixed_s,
        message.read_s,
        message.token_s,
        message.sequence_s,
        message.kv_s,
        message.attention_s,
        message.overlap,
    )


def logprobs_to_proto(token: SampledToken) -> types_pb2.PositionLogprobs | None:
    """None where none were asked for."""
    if token.logprob is None:
        return None
    return types_pb2.PositionLogprobs(
        logprob=token.logprob,
        top=[types_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
    )
