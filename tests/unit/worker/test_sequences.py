"""The engine's sequence of a command: what it may hold, and which commands have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.worker.host import EngineHost
from services.worker.sequences import sequence_of, session_of
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import InvalidRequest, PromptTooLong
from shared.kv.hashing import ChainRoots
from shared.kv.layout import LAYOUT_VERSION, BlockLayout, KVFormat
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.rpc.pb.tandem.v1.types_pb2 import SamplingParams
from shared.rpc.pb.tandem.v1.worker_pb2 import Reserve, Submit

LAYOUT = BlockLayout(num_layers=1, block_size=16, format=KVFormat("float32", 1, 8))
LIMIT = 64


def host(step_times: str | None = None, **decoder: Any) -> EngineHost:
    """A worker whose decoder is of one process and one stage, but for what is given."""
    model = SimpleNamespace(
        decoder=SimpleNamespace(**{"is_split": False, "num_stages": 1, **decoder}),
        config=SimpleNamespace(vocab_size=100, eos_token_ids=(2,)),
        layout=LAYOUT,
        max_model_len=LIMIT,
        roots=ChainRoots("f", LAYOUT.format.name, LAYOUT_VERSION),
    )
    return cast(EngineHost, SimpleNamespace(model=model, settings=SimpleNamespace(name="w", step_times=step_times)))


def command(num_tokens: int = 40, num_prompt: int = 40, **others: Any) -> Reserve:
    sampling = {"temperature": 0.0, "seed": 1, "max_tokens": 4} | others.pop("sampling", {})
    fields = {"token_ids": [5] * num_tokens, "num_prompt_tokens": num_prompt, **others}
    return Reserve(sampling=SamplingParams(**{k: v for k, v in sampling.items() if v is not None}), **fields)


def built(asked: Reserve | Submit, goal: Goal = Goal.COMPLETION, ship: frozenset[int] = frozenset()) -> EngineSequence:
    return sequence_of(host(), "1/a", asked, goal, ship, b"")


@pytest.mark.parametrize("missing", ["seed", "max_tokens"])
def test_a_command_says_how_long_its_answer_may_be_and_by_which_seed(missing: str) -> None:
    with pytest.raises(InvalidRequest, match=f"must carry {missing}") as refused:
        built(command(sampling={missing: None}))
    assert refused.value.details["field"] == f"sampling.{missing}"


def test_a_worker_that_decodes_has_room_for_the_answer_and_one_that_prefills_for_the_prompt() -> None:
    most = command(num_tokens=40, sampling={"max_tokens": LIMIT - 40})
    assert built(most).max_tokens_total == LIMIT
    longer = command(num_tokens=40, sampling={"max_tokens": LIMIT - 39})
    with pytest.raises(PromptTooLong, match=f"takes {LIMIT + 1} tokens, .* is {LIMIT}"):
        built(longer)
    assert built(longer, Goal.FIRST_TOKEN).num_prompt_tokens == 40
    assert built(command(LIMIT, LIMIT), Goal.FIRST_TOKEN).token_ids == [5] * LIMIT
    with pytest.raises(PromptTooLong):
        built(command(LIMIT + 1, LIMIT + 1), Goal.FIRST_TOKEN)


def test_hidden_states_are_pooled_where_one_process_computes_the_whole_model() -> None:
    asked = command(sampling={"max_tokens": 1, "pooling": types_pb2.POOLING_LAST})
    assert sequence_of(host(), "1/a", asked, Goal.FIRST_TOKEN, frozenset(), b"").sampling.pooling == "last"
    for other, why in (
        (host(step_times="steps.json"), "computes nothing"),
        (host(is_split=True), "is split"),
        (host(num_stages=2), "is split"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            sequence_of(other, "1/a", asked, Goal.FIRST_TOKEN, frozenset(), b"")


def test_an_answer_that_is_complete_already_has_room_for_the_token_that_says_so() -> None:
    assert built(command(num_tokens=44, num_prompt=40)).max_tokens_total == 45
    assert built(command(num_tokens=43, num_prompt=40)).max_tokens_total == 44


@pytest.mark.parametrize(("num_tokens", "num_prompt"), [(0, 0), (4, 0), (4, 5)])
def test_a_prompt_has_a_token_and_no_more_than_are_there(num_tokens: int, num_prompt: int) -> None:
    with pytest.raises(InvalidRequest, match="at least one token"):
        built(command(num_tokens, num_prompt))
    assert built(command(4, 4)).num_prompt_tokens == 4


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
def test_ids_that_the_model_has_no_row_for_are_refused(field: str) -> None:
    def asked(token_id: int) -> Reserve:
        made = command()
        if field == "prompt":
            made.token_ids.append(token_id)
        elif field == "stop_token_ids":
            made.sampling.stop_token_ids.append(token_id)
        else:
            made.sampling.logit_bias[token_id] = 1.0
        return made

    built(asked(99))
    with pytest.raises(InvalidRequest, match="holds token id 100") as refused:
        built(asked(100))
    assert refused.value.details == {"field": field, "limit": 99}


def test_blocks_that_are_to_be_sent_hold_tokens_of_the_prompt() -> None:
    assert built(command(33, 33), Goal.FIRST_TOKEN, frozenset({0, 2})).ship_blocks == {0, 2}
    with pytest.raises(InvalidRequest, match="names block 2 of 32 tokens"):
        built(command(32, 32), Goal.FIRST_TOKEN, frozenset({0, 2}))


def test_a_session_is_its_tenants_own_and_only_a_reserve_knows_its_next_turn() -> None:
    assert session_of("a", "b/c") != session_of("a/b", "c")
    assert session_of("a", "") == ""
    reserved = built(command(tenant="a", session="s", next_turn_s=2.5, priority=3))
    assert (reserved.session, reserved.next_turn_s, reserved.priority) == (session_of("a", "s"), 2.5, 0)
    assert built(command(priority=-2)).priority == -2
    assert built(command()).next_turn_s is None
    submitted = Submit(token_ids=[5], num_prompt_tokens=1, sampling=command().sampling)
    assert built(submitted, Goal.FIRST_TOKEN).next_turn_s is None
