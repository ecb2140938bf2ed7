"""The engine's sequence of a command that begins a request, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.host import EngineHost
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import InvalidRequest, PromptTooLong
from shared.rpc.convert import sampling_from_proto
from shared.rpc.pb.tandem.v1.worker_pb2 import Reserve, Submit
from shared.structure.structured_output import StructuredOutput


def sequence_of(
    host: EngineHost,
    sequence_id: str,
    command: Submit | Reserve,
    goal: Goal,
    ship_blocks: frozenset[int],
    receiver: bytes,
) -> EngineSequence:
    """Has its structure compiled, too. Raises PromptTooLong, InvalidRequest, Overloaded (too many structures wait to be
    compiled)."""
    token_ids, num_prompt_tokens = list(command.token_ids), command.num_prompt_tokens
    model = host.model
    params = sampling_from_proto(command.sampling)
    if params.max_tokens is None or params.seed is None:
        field = "seed" if params.seed is None else "max_tokens"
        raise InvalidRequest(f"a command must carry {field}", field=f"sampling.{field}")
    if params.pooling:
        _check_pools(host)
    if params.beams is not None and host.settings.step_times is not None:
        why = f"worker {host.settings.name} searches no beams: its device computes nothing"
        raise InvalidRequest(why, field="use_beam_search")
    if params.beams is not None and model.layout.format.is_converted:
        # The tokens likeliest behind a prompt need the KV of its last token, which such workers never compute.
        why = f"worker {host.settings.name} searches no beams: its KV, {model.layout.format.name}, is converted"
        raise InvalidRequest(why, field="use_beam_search")
    vocab_size = model.config.vocab_size
    # An id that the model has no row for would not fail this request alone: it would end the engine.
    if not 0 < num_prompt_tokens <= len(token_ids):
        raise InvalidRequest(
            f"prompt must hold at least one token, num_prompt_tokens is {num_prompt_tokens} of {len(token_ids)}",
            field="prompt",
            limit=1,
        )
    _check_ids("prompt", token_ids, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
    _check_ids("bad_sequences", [token_id for bad in params.bad_sequences for token_id in bad], vocab_size)
    groups = model.layout.groups
    if any(place // groups.size * groups.block_size >= len(token_ids) for place in ship_blocks):
        raise InvalidRequest(
            f"needed_blocks names block {max(ship_blocks)} of {len(token_ids)} tokens", field="needed_blocks"
        )
    total = num_prompt_tokens + params.max_tokens
    # A prefill worker holds the tokens it is given; where the answer may grow is the decode worker's to check.
    held = len(token_ids) if goal is Goal.FIRST_TOKEN else total
    if held > model.max_model_len:
        raise PromptTooLong(
            f"the request takes {held} tokens, the limit of worker {host.settings.name} is {model.max_model_len}",
            field="max_tokens",
            limit=model.max_model_len,
        )
    if params.structured_output is not None:
        _prepare(host, params.structured_output)
    return EngineSequence(
        sequence_id=sequence_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        sampling=params,
        hash_root=model.roots.of(command.salt, num_prompt_tokens, command.adapter),
        goal=goal,
        max_tokens_total=max(total, len(token_ids) + 1),
        eos_token_ids=frozenset(model.config.eos_token_ids),
        ship_blocks=ship_blocks,
        receiver=receiver,
        tenant=command.tenant,
        priority=min(0, command.priority),
        retain_s=command.retain_s,
        session=session_of(command.tenant, command.session),
        next_turn_s=_next_turn_s(command),
    )


def _next_turn_s(command: Submit | Reserve) -> float | None:
    """Seconds until the session's next turn: of a Reserve. A worker that only prefills gets an ExpectSession when the
    answer ends."""
    if isinstance(command, Reserve) and command.HasField("next_turn_s"):
        return command.next_turn_s
    return None


def session_of(tenant: str, session: str) -> str:
    """The name of a tenant's session in the pool, which no other tenant's has; empty without one."""
    return f"{len(tenant)}/{tenant}/{session}" if session else ""


def _check_pools(host: EngineHost) -> None:
    """Raises InvalidRequest (`sampling.pooling`) where no hidden states come of this worker."""
    decoder, name = host.model.decoder, host.settings.name
    is_split = decoder.is_split or decoder.num_stages > 1
    if is_split or host.settings.step_times is not None:
        why = "its model is split over processes" if is_split else "its device computes nothing"
        raise InvalidRequest(f"worker {name} pools no hidden states: {why}", field="sampling.pooling")


def _prepare(host: EngineHost, structure: StructuredOutput) -> None:
    """Has a structure compiled while the prompt is computed. Raises InvalidRequest where it is known not to be
    compiled: no router lets it pass."""
    compiled = host.structures.prepare(structure)
    if compiled.done():
        compiled.result()


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"{field} holds token id {max(token_ids)}, the model's are below {vocab_size}",
            field=field,
            limit=vocab_size - 1,
        )
