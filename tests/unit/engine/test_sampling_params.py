"""Every bound of SamplingParams names its field."""

from __future__ import annotations

import pytest

from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 101.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (1,) * 257),
        ("logprobs", 21),
    ],
)
def test_out_of_bounds_is_refused_with_its_field(field, value):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert refused.value.details["limit"]


def test_min_tokens_may_not_exceed_max_tokens_also_when_that_is_resolved_later():
    with pytest.raises(InvalidRequest):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequest):
        SamplingParams(min_tokens=5).resolved(seed=1, max_tokens=4)


def test_resolved_keeps_what_the_client_gave():
    params = SamplingParams(seed=4).resolved(seed=9, max_tokens=7)
    assert (params.seed, params.max_tokens) == (4, 7)
