"""What crosses the wire comes back as it was."""

from __future__ import annotations

from shared.engine.finish_reason import FinishReason
from shared.rpc.convert import finish_reason_from_proto, finish_reason_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2


def test_every_finish_reason_has_a_number_of_its_own_and_comes_back():
    reasons = (None, *FinishReason)
    numbers = [finish_reason_to_proto(reason) for reason in reasons]
    assert sorted(numbers) == sorted(types_pb2.FinishReason.values())
    assert [finish_reason_from_proto(number) for number in numbers] == list(reasons)
