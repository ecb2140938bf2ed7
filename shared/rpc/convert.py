"""Between messages and the plain types inside. Each conversion happens once, at the edge of a process."""

from __future__ import annotations

from typing import Literal, get_args

from shared.engine.plan import SampledToken
from shared.engine.sampling_params import SamplingParams
from shared.kv.format import KVFormat
from shared.kv.layout import LAYOUT_VERSION, BlockLayout
from shared.rpc.pb.tandem.v1 import types_pb2

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
]
_OPTIONAL: tuple[_OptionalName, ...] = get_args(_OptionalName)


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Absent fields take their defaults. Raises InvalidRequest naming the field that is out of bounds."""
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(
        **given,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """For a worker: stop strings stay behind, they are the router's to find."""
    given = {name: getattr(params, name) for name in _OPTIONAL if getattr(params, name) is not None}
    return types_pb2.SamplingParams(
        **given,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def layout_to_proto(layout: BlockLayout) -> types_pb2.BlockLayout:
    """The layout with this build's layout version."""
    return types_pb2.BlockLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.format.num_kv_heads,
        head_dim=layout.format.head_dim,
        block_size=layout.block_size,
        dtype=layout.format.dtype,
        layout_version=LAYOUT_VERSION,
    )


def layout_from_proto(message: types_pb2.BlockLayout) -> BlockLayout:
    """The layout without its version, which the caller compares."""
    return BlockLayout(
        num_layers=message.num_layers,
        block_size=message.block_size,
        format=KVFormat(message.dtype, message.num_kv_heads, message.head_dim),
    )


def logprobs_to_proto(token: SampledToken) -> types_pb2.PositionLogprobs | None:
    """None where none were asked for."""
    if token.logprob is None:
        return None
    return types_pb2.PositionLogprobs(
        logprob=token.logprob,
        top=[types_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
    )
