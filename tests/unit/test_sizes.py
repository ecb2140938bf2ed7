"""Sizes as people read them."""

from __future__ import annotations

import pytest

from shared.sizes import size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (1 << 50, "1024 TiB")],
)
def test_sizes_are_read_by_people(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
