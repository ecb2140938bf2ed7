"""Options of a call beside its prompt, and the requests and metadata made of them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypedDict

from google.protobuf.message import Message

from shared.errors import InvalidRequest, brief
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from shared.seeds import derived_seed
from tandem.answer import Answer

MAX_N = 128
_FOREVER_S = 1e9
"""gRPC's clock ends after some centuries, and it takes a deadline beyond that for one that has passed."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or chat messages with `role` and `content`."""


class Options(TypedDict, total=False):
    """All may be left out. The bounds are the cluster's; what it refuses raises InvalidRequest naming the field."""

    temperature: float
    """0 = greedy; default 1."""
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    """Equal seeds give equal answers; drawn by the router by default."""
    max_tokens: int
    """Default: the rest of the context."""
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    """Alternatives beside each token's log-probability; 0 = the token's own alone."""

    request_id: str
    """Default: a drawn one."""
    model: str
    cache_salt: str
    tenant: str
    session: str
    """The turns of one conversation share it."""
    priority: int
    retention: str
    """How long the prefix is kept after each use: 5m, 1h or 24h. Default: as long as nothing newer takes its place."""
    next_turn_s: float
    """From the answer's end until the session's next request, as far as that is known: of what is retained, that of
    sessions that come back later is evicted first. See also `expect_session`."""
    ttft_timeout_s: float
    """Rather refused than a first token later than this. Seconds."""
    traceparent: str
    timeout_s: float
    """The whole answer's deadline, pauses included; default: none. Seconds."""


_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_HEADERS = {
    "tenant": "x-tenant",
    "session": "x-session-id",
    "priority": "x-priority",
    "retention": "x-cache-retention",
    "traceparent": "traceparent",
}


def requests_of(
    prompt: Prompt, n: int, options: Options, resume: Answer | None = None
) -> list[inference_pb2.GenerateRequest]:
    """One request for each of `n` answers, with ids and seeds of their own; the same as `n` over HTTP. `resume`: the
    answer that the only one continues.

    Raises InvalidRequest for what the messages cannot carry.
    """
    if resume is not None and n != 1:
        raise InvalidRequest("resume continues one answer: n must be 1", field="n", limit=1)
    if resume is not None and resume.finish_reason:
        raise InvalidRequest("resume: the answer is complete", field="resume")
    if resume is not None:
        options = {**options, "request_id": resume.request_id}
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n must be from 1 to {MAX_N}, got {n}", field="n", limit=MAX_N)
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        name = min(unknown)
        raise InvalidRequest(f"there is no option {name!r}", field=name)
    base = inference_pb2.GenerateRequest()
    _set(base, "request_id", options.get("request_id") or str(uuid.uuid4()))
    for name in ("model", "cache_salt"):
        _set(base, name, options.get(name))
    for name in _SAMPLING & options.keys():
        value = options[name]  # type: ignore[literal-required]
        _set(base.sampling, name, [value] if name == "stop" and isinstance(value, str) else value)
    _add_prompt(base, prompt)
    return [base] if n == 1 else [_choice(base, index) for index in range(n)]


def warm_request(prompt: Prompt, options: Options) -> inference_pb2.GenerateRequest:
    """The request of a prompt that is only computed. Raises InvalidRequest for what the message cannot carry."""
    return requests_of(prompt, 1, options)[0]


def deadline_of(timeout_s: float | None) -> float | None:
    """What a call is given, None for no deadline. Raises InvalidRequest (`timeout_s`) for what is no time."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, Real) or math.isnan(timeout_s):
        raise InvalidRequest(f"timeout_s must be a number of seconds, got {timeout_s!r}", field="timeout_s")
    return None if timeout_s > _FOREVER_S else float(timeout_s)


def metadata_of(options: Options) -> tuple[tuple[str, str], ...]:
    """The call's scheduling hints."""
    entries = [(key, str(value)) for name, key in _HEADERS.items() if (value := options.get(name)) is not None]
    if (ttft_s := options.get("ttft_timeout_s")) is not None:
        entries.append(("x-ttft-timeout-ms", f"{ttft_s * 1e3:g}"))
    if (next_turn_s := options.get("next_turn_s")) is not None:
        entries.append(("x-next-turn-ms", f"{next_turn_s * 1e3:g}"))
    for key, value in entries:
        if not value.isascii() or not value.isprintable():
            raise InvalidRequest(f"{key} must be printable ASCII", field=key)
    return tuple(entries)


def _choice(base: inference_pb2.GenerateRequest, index: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(base)
    request.request_id = f"{base.request_id}-{index}"
    if base.sampling.HasField("seed"):
        request.sampling.seed = derived_seed(base.sampling.seed, index)
    return request


def _add_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    elif all(isinstance(part, Mapping) for part in prompt) and prompt:
        for index, part in enumerate(prompt):
            assert isinstance(part, Mapping)
            further = [name for name, value in part.items() if value is not None and name not in ("role", "content")]
            if further:
                message = f"messages[{index}] has {further[0]!r}: only role and content can be sent"
                raise InvalidRequest(message, field=further[0])
            added = request.chat.messages.add()
            _set(added, "role", part.get("role"))
            _set(added, "content", part.get("content"))
    else:
        request.tokens.SetInParent()
        _set(request.tokens, "ids", prompt)


def _set(message: Message, name: str, value: Any) -> None:
    """Sets a field where there is a value; raises InvalidRequest for one that the field cannot hold."""
    if value is None:
        return
    try:
        if message.DESCRIPTOR.fields_by_name[name].is_repeated:
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be {brief(repr(value), 80)}: {error}", field=name) from error
