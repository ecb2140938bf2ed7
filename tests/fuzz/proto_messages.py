"""Protobuf messages drawn from their descriptors, and their bytes with pieces replaced."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_MAX_DEPTH = 4
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Any message of the type; of the members of a oneof, the last one drawn counts."""
    cls: Any = GetMessageClass(descriptor)
    fields = {field.name: _values(field, depth) for field in descriptor.fields if _fits(field, depth)}
    if not fields:
        return st.builds(cls)
    names = st.lists(st.sampled_from(list(fields)), max_size=5)

    @st.composite
    def drawn(draw: st.DrawFn) -> Message:
        message: Message = cls(**{name: draw(fields[name]) for name in draw(names)})
        return message

    return drawn()


def raw_messages(descriptor: Descriptor) -> st.SearchStrategy[bytes]:
    """Their bytes, one time in four damaged."""
    whole = messages(descriptor).map(lambda message: message.SerializeToString())
    return st.one_of(whole, whole, whole, st.builds(damaged, whole, st.floats(0, 1), st.binary(max_size=6)))


def damaged(raw: bytes, at: float, piece: bytes) -> bytes:
    """`raw` with `piece` in place of what stood there."""
    place = int(at * len(raw))
    return raw[:place] + piece + raw[place + len(piece) :]


def _fits(field: FieldDescriptor, depth: int) -> bool:
    return field.message_type is None or depth < _MAX_DEPTH


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    one = _one(field, depth)
    if not field.is_repeated:
        return one
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return st.dictionaries(*(_one(part, depth) for part in field.message_type.fields), max_size=3)
    return st.lists(one, max_size=4)


def _one(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.enum_type is not None:
        return st.integers(-1, 12)
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return st.integers(max(low, -2), 300) | st.sampled_from([low, high]) | st.integers(low, high)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.floats(-2, 2) | st.floats(width=32)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
