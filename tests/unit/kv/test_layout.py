"""Block dimensions: sizes, bounds, and refusal of a layout that differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.errors import InvalidRequest, ModelMismatch
from shared.kv.layout import BlockLayout, KVFormat

LAYOUT = BlockLayout(3, 16, KVFormat("bfloat16", num_kv_heads=2, head_dim=8))


def changed(layout: BlockLayout, **values: object) -> BlockLayout:
    """The layout with other values of its own fields or of its format's."""
    own = {name: values.pop(name) for name in ("num_layers", "block_size") if name in values}
    return replace(layout, **own, format=replace(layout.format, **values))  # type: ignore[arg-type]


def test_sizes_follow_from_the_dimensions() -> None:
    assert LAYOUT.block_bytes == 2 * (2 * 3 * 2 * 16 * 8)
    assert changed(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes
    assert LAYOUT.shape(5) == (5, 3, 2, 2, 16, 8)
    assert "bfloat16" in LAYOUT.describe()


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_dimension_out_of_bounds_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        changed(LAYOUT, **{field: value})
    assert caught.value.field == field


def test_an_unknown_dtype_and_a_block_of_broken_words_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        changed(LAYOUT, dtype="int8")
    assert caught.value.field == "dtype"
    with pytest.raises(InvalidRequest) as caught:
        BlockLayout(1, 1, KVFormat("float16", 1, 1))
    assert caught.value.field == "block_size"


def test_every_differing_field_is_named() -> None:
    LAYOUT.ensure_compatible(replace(LAYOUT))
    with pytest.raises(ModelMismatch, match=r"dtype bfloat16 here, float32 there; head_dim 8 here, 16 there"):
        LAYOUT.ensure_compatible(changed(LAYOUT, head_dim=16, dtype="float32"))
