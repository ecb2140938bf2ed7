"""Which adapter a conversation asks for."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from loadtest.config import LoadConfig, Traffic
from loadtest.schedule import Limits, draw_adapters
from shared.errors import ConfigError


@pytest.mark.parametrize("skew", [-0.1, 11.0, float("nan")])
def test_a_skew_that_is_none_is_refused_by_name(skew: float) -> None:
    with pytest.raises(ConfigError, match="adapter_skew must be between 0 and 10") as refused:
        LoadConfig("http://a:1", "fixed", None, Traffic(rate=1.0), Limits(), 0, adapters=("a",), adapter_skew=skew)
    assert refused.value.field == "adapter_skew"


def test_adapters_are_drawn_by_zipfs_law_alike_for_one_seed() -> None:
    names = ("a", "b", "c")
    drawn = list(islice(draw_adapters(names, 1.0, 5), 60_000))
    shares = Counter(drawn)
    assert [shares[name] / 60_000 for name in names] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)
    assert drawn == list(islice(draw_adapters(names, 1.0, 5), 60_000))
    assert drawn != list(islice(draw_adapters(names, 1.0, 6), 60_000))
