"""Plans cross process boundaries unchanged; damaged ones are refused."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.group.plans import VERSION, PlanDecoder, PlanEncoder
from shared.engine.plan import BlockCopy, PlannedSequence, SampleSpec, StepPlan
from shared.engine.sampling_params import LEAST_REPETITION, SamplingParams
from shared.errors import ModelMismatch, TransferFailed
from shared.structure.structured_output import ReasoningPart, StructuredOutput, StructureKind

ints = st.integers(0, 2**31 - 1)
lists = st.lists(ints, max_size=5).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
filled = st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=1, max_size=12)
reasonings = st.none() | st.builds(ReasoningPart, filled, filled, st.booleans())
structures = st.one_of(
    st.builds(
        StructuredOutput,
        st.sampled_from([k for k in StructureKind if k not in (StructureKind.CHOICE, StructureKind.ALLOWED_TOKENS)]),
        filled,
        reasoning=reasonings,
    ),
    st.builds(StructuredOutput, st.just(StructureKind.ALLOWED_TOKENS), st.from_regex(r"[1-9],[1-9]-9", fullmatch=True)),
    st.builds(
        StructuredOutput,
        st.just(StructureKind.CHOICE),
        choices=st.lists(filled, min_size=1, max_size=4).map(tuple),
        reasoning=reasonings,
    ),
)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=ints,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(LEAST_REPETITION, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.none() | st.integers(9, 2**40),
    min_tokens=st.integers(0, 9),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.lists(st.tuples(ints, st.floats(-100, 100)), max_size=3).map(tuple),
    bad_sequences=st.lists(st.lists(ints, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    structured_output=st.none() | structures,
)
specs = st.builds(SampleSpec, params, ints, lists, lists, lists)
sequences = st.builds(
    PlannedSequence,
    sequence_id=names,
    token_ids=lists,
    start=ints,
    block_ids=lists,
    num_prompt_tokens=ints,
    samples=st.lists(specs, max_size=2).map(tuple),
    pending=st.none() | ints,
    targets=lists,
    num_alternatives=st.integers(0, 20),
    num_pooled=st.just(0),  # a group pools no hidden states
    adapter=ints,
    following=st.just(0),  # a group has no head, which alone reads it
    guess_states=lists,
)
copies = st.builds(BlockCopy, ints, ints, st.booleans())
plans = st.builds(StepPlan, st.lists(sequences, max_size=3).map(tuple), st.lists(copies, max_size=3).map(tuple))


@pytest.mark.slow
@given(st.lists(plans, max_size=3))
def test_plans_come_back_equal(given_plans: list[StepPlan]) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for plan in given_plans:
        assert decoder.decode(encoder.encode(plan)) == plan


def decodes(step: int, num_context_blocks: int) -> StepPlan:
    """64 sequences in their `step`th decode, each with a block more every 16 steps."""
    blocks = num_context_blocks + step // 16
    return StepPlan(
        tuple(
            PlannedSequence(
                f"request-{i}",
                (i,),
                1000 + step,
                tuple(range(i, i + blocks)),
                1000,
                (SampleSpec(PARAMS[i], 1001 + step),),
            )
            for i in range(64)
        )
    )


PARAMS = [SamplingParams(seed=i, max_tokens=64, stop_token_ids=(i,)) for i in range(64)]


@pytest.mark.parametrize("num_context_blocks", [64, 4096])
def test_a_running_batch_costs_a_row_a_sequence_whatever_its_context(num_context_blocks: int) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    sizes = []
    for step in range(20):
        data = encoder.encode(decodes(step, num_context_blocks))
        assert decoder.decode(data) == decodes(step, num_context_blocks)
        sizes.append(len(data))
    assert max(sizes[1:]) < 64 * 32


def test_a_sequence_that_was_preempted_or_left_out_is_sent_whole_again() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    a = PlannedSequence("a", (1,), 17, (4, 5), 17, (SampleSpec(PARAMS[0], 18),))
    moved = PlannedSequence("a", (1,), 18, (7, 9), 17, (SampleSpec(PARAMS[0], 19),))
    for plan in (StepPlan((a,)), StepPlan((moved,)), StepPlan(()), StepPlan((a,))):
        assert decoder.decode(encoder.encode(plan)) == plan


def test_a_decoder_that_missed_a_plan_says_so() -> None:
    encoder = PlanEncoder()
    encoder.encode(decodes(0, 4))
    with pytest.raises(TransferFailed, match="sequence 0 of 0 in the plan before"):
        PlanDecoder().decode(encoder.encode(decodes(1, 4)))


PLAN = StepPlan(
    (
        PlannedSequence("a", (1, 2, 3), 4, (5, 6), 7, ()),
        PlannedSequence("bü", (0,), 9, (8,), 4, (SampleSpec(SamplingParams(stop=("x",)), 10, (1,), (2,), (3,)),), 0),
        PlannedSequence("l", (6,), 9, (8,), 4, (SampleSpec(PARAMS[1], 10),), adapter=3),
        PlannedSequence("g", (4, 5), 9, (8,), 4, (SampleSpec(PARAMS[0], 10), SampleSpec(PARAMS[0], 11, (), (7,)))),
    ),
    (BlockCopy(1, 2, to_host=True),),
)  # fmt: skip


def test_every_truncated_or_prolonged_message_is_refused() -> None:
    data = PlanEncoder().encode(PLAN)
    for end in range(len(data)):
        with pytest.raises(TransferFailed, match="no plan of a step"):
            PlanDecoder().decode(data[:end])
    with pytest.raises(TransferFailed):
        PlanDecoder().decode(data + b"\0")


def test_another_version_is_refused_by_its_number() -> None:
    data = bytearray(PlanEncoder().encode(PLAN))
    struct.pack_into("<H", data, 4, VERSION + 1)
    with pytest.raises(ModelMismatch, match=f"version {VERSION + 1}"):
        PlanDecoder().decode(bytes(data))


@given(st.binary(max_size=80), st.integers(0, 60), st.integers(0, 255))
def test_no_bytes_raise_anything_else(data: bytes, place: int, value: int) -> None:
    with pytest.raises((TransferFailed, ModelMismatch)):
        PlanDecoder().decode(data)
    damaged = bytearray(PlanEncoder().encode(PLAN))
    damaged[place] = value
    with contextlib.suppress(TransferFailed, ModelMismatch):
        PlanDecoder().decode(bytes(damaged))
