"""What crosses the wire comes back as it was."""

from __future__ import annotations

import pytest

from shared.engine.finish_reason import FinishReason
from shared.identity import WorkerRole
from shared.rpc.convert import finish_reason_from_proto, finish_reason_to_proto, role_from_proto, role_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2


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
