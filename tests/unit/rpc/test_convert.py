"""What crosses the wire comes back as it was."""

from __future__ import annotations

import pytest

from shared.engine.finish_reason import FinishReason
from shared.engine.sampling_params import SamplingParams, Speculation
from shared.errors import InvalidRequest
from shared.identity import WorkerRole
from shared.rpc.convert import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    role_from_proto,
    role_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    step_times_from_proto,
    step_times_to_proto,
)
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.sizing.step_time import StepTimes
from shared.structure.structured_output import (
    MAX_CHOICES,
    MAX_STRUCTURE_BYTES,
    ReasoningPart,
    StructuredOutput,
    StructureKind,
)


def test_every_role_has_the_number_of_its_name_and_comes_back():
    numbers = {f"WORKER_ROLE_{role.name}": role_to_proto(role) for role in WorkerRole}
    assert numbers == {name: number for name, number in types_pb2.WorkerRole.items() if number != 0}
    assert [role_from_proto(number) for number in numbers.values()] == list(WorkerRole)
    for number in (0, 9):
        with pytest.raises(ValueError, match=f"{number} is no worker role"):
            role_from_proto(number)


def test_every_finish_reason_has_a_number_of_its_own_and_comes_back():
    reasons = (None, *FinishReason)
    numbers = [finish_reason_to_proto(reason) for reason in reasons]
    assert sorted(numbers) == sorted(types_pb2.FinishReason.values())
    assert [finish_reason_from_proto(number) for number in numbers] == list(reasons)


@pytest.mark.parametrize(
    "structure",
    [
        StructuredOutput(StructureKind.JSON_OBJECT),
        StructuredOutput(StructureKind.JSON_SCHEMA, '{"type": "object"}'),
        StructuredOutput(StructureKind.REGEX, "[0-9]+ °C"),
        StructuredOutput(StructureKind.CHOICE, choices=("yes", "no")),
        StructuredOutput(StructureKind.GRAMMAR, 'start: "a"+'),
        StructuredOutput(StructureKind.JSON_OBJECT, reasoning=ReasoningPart("<think>", "</think>", is_open=True)),
        StructuredOutput(StructureKind.CHOICE, choices=("a",), reasoning=ReasoningPart("[T]", "[/T]", is_open=False)),
    ],
    ids=lambda structure: structure.kind.value,
)
def test_every_structure_comes_back(structure):
    message = sampling_to_proto(SamplingParams(structured_output=structure))
    assert sampling_from_proto(message).structured_output == structure
    assert message.structured_output.WhichOneof("kind") == structure.kind.value


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (types_pb2.StructuredOutput(), "structured_output"),
        (types_pb2.StructuredOutput(json_object=False), "structured_output"),
        (types_pb2.StructuredOutput(json_object=True, reasoning={"begin": "<think>"}), "reasoning.end"),
        (types_pb2.StructuredOutput(json_schema=""), "json_schema"),
        (types_pb2.StructuredOutput(regex=" "), "regex"),
        (types_pb2.StructuredOutput(grammar="x" * (MAX_STRUCTURE_BYTES + 1)), "grammar"),
        (types_pb2.StructuredOutput(allowed_tokens="5-"), "allowed_tokens"),
        (types_pb2.StructuredOutput(allowed_tokens="9" * 5000), "allowed_tokens"),
        (types_pb2.StructuredOutput(choice={}), "choice"),
        (types_pb2.StructuredOutput(choice={"values": ["a", ""]}), "choice"),
        (types_pb2.StructuredOutput(choice={"values": ["a"] * (MAX_CHOICES + 1)}), "choice"),
    ],
)
def test_a_structure_out_of_bounds_is_refused_with_its_field(message, field):
    with pytest.raises(InvalidRequest) as refused:
        sampling_from_proto(types_pb2.SamplingParams(structured_output=message))
    assert refused.value.field == field
    assert refused.value.details["limit"]


@pytest.mark.parametrize("speculation", [Speculation(), Speculation("off"), Speculation("ngram", 3)])
def test_what_may_be_guessed_comes_back(speculation):
    assert sampling_from_proto(sampling_to_proto(SamplingParams(speculation=speculation))).speculation == speculation


def test_step_times_come_back_as_they_were():
    times = StepTimes(3e-3, 4e-3, 0.4e-3, 0.2e-3, 0.7e-6, 0.1e-6, overlap=0.8)
    assert step_times_from_proto(step_times_to_proto(times)) == times
