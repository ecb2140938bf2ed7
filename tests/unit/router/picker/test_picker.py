"""The endpoint picker: which router a request goes to, and in what messages."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from services.router.picker.ext_proc import destination, headers_of, immediate, subset_value
from services.router.picker.picker import subset_of
from services.router.picker.router_order import SESSION_SLACK, Endpoint, Refusal, choose
from shared.errors import InvalidRequest, Overloaded

ENDPOINTS = st.lists(
    st.builds(
        Endpoint,
        st.integers(1, 20).map(lambda host: f"10.0.0.{host}:8000"),
        st.booleans(),
        st.booleans(),
        st.integers(0, 50),
    ),
    max_size=8,
    unique_by=lambda endpoint: endpoint.address,
)
SUBSETS = st.none() | st.sets(st.integers(1, 20).map(lambda host: f"10.0.0.{host}:8000"))


def routers(*loads: int) -> list[Endpoint]:
    return [Endpoint(f"10.0.0.{number}:8000", True, False, load) for number, load in enumerate(loads)]


def first(endpoints: list[Endpoint], session: str = "", seed: int = 0) -> str:
    chosen = choose(endpoints, None, session, 1, random.Random(seed))
    assert isinstance(chosen, list)
    return chosen[0].address


@given(ENDPOINTS, SUBSETS, st.sampled_from(["", "tenant/a", "tenant/b"]), st.integers(1, 4), st.integers(0, 9))
def test_only_ready_ones_of_the_subset_that_have_room_are_named(endpoints, subset, session, most, seed) -> None:
    chosen = choose(endpoints, subset, session, most, random.Random(seed))
    allowed = [each for each in endpoints if each.ready and (subset is None or each.address in subset)]
    free = [each for each in allowed if not each.full]
    if not allowed:
        assert chosen is Refusal.NOT_READY
    elif not free:
        assert chosen is Refusal.FULL
    else:
        assert isinstance(chosen, list)
        assert len(chosen) == min(most, len(free)) == len({each.address for each in chosen})
        assert all(each in free for each in chosen)


def test_the_least_loaded_goes_first_and_the_next_ones_follow() -> None:
    chosen = choose(routers(5, 1, 3), None, "", 3, random.Random(0))
    assert isinstance(chosen, list)
    assert [each.load for each in chosen] == [1, 3, 5]


def test_equals_share_the_requests() -> None:
    counts = Counter(first(routers(2, 2, 2), seed=seed) for seed in range(300))
    assert len(counts) == 3
    assert min(counts.values()) > 60


def test_a_session_stays_until_its_router_has_far_more_to_do() -> None:
    home = first(routers(0, 0, 0), "tenant/a")
    for load in range(SESSION_SLACK + 1):
        loaded = routers(0, 0, 0)
        for each in loaded:
            each.load = load if each.address == home else 0
        assert first(loaded, "tenant/a") == home
    overloaded = routers(0, 0, 0)
    for each in overloaded:
        each.load = 100 if each.address == home else 0
    assert first(overloaded, "tenant/a") != home


def test_sessions_spread_and_keep_their_router_when_another_one_goes() -> None:
    sessions = [f"tenant/{number}" for number in range(200)]
    before = {session: first(routers(0, 0, 0, 0), session) for session in sessions}
    assert min(Counter(before.values()).values()) > 20
    for session in sessions:
        left = routers(0, 0, 0)
        if before[session] in {each.address for each in left}:
            assert first(left, session) == before[session]


def test_a_full_home_sends_its_session_elsewhere() -> None:
    endpoints = routers(0, 0)
    home = first(endpoints, "tenant/a")
    for each in endpoints:
        each.full = each.address == home
    assert first(endpoints, "tenant/a") != home


def test_headers_are_read_raw_or_as_text() -> None:
    headers = HeaderMap(
        headers=[
            HeaderValue(key="X-Session-Id", raw_value=b"s\xe9"),
            HeaderValue(key="x-session-id", value="later"),
            HeaderValue(key=":path", value="/v1/completions"),
        ]
    )
    assert headers_of(headers) == {"x-session-id": "sé", ":path": "/v1/completions"}


def test_header_and_metadata_name_the_same_endpoints() -> None:
    mutation, metadata = destination(["10.0.0.1:8000", "10.0.0.2:8000"])
    [header] = mutation.set_headers
    assert header.header.key == "x-gateway-destination-endpoint"
    assert header.header.raw_value == b"10.0.0.1:8000,10.0.0.2:8000"
    assert MessageToDict(metadata) == {"envoy.lb": {"x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000"}}


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (None, None),
        ({"other": "x"}, None),
        ({"x-gateway-destination-endpoint-subset": []}, []),
        ({"x-gateway-destination-endpoint-subset": ["a:1", "b:2"]}, ["a:1", "b:2"]),
        ({"x-gateway-destination-endpoint-subset": "a:1, b:2"}, ["a:1", "b:2"]),
    ],
)
def test_the_subset_hint_is_read(hint: dict[str, object] | None, subset: list[str] | None) -> None:
    request = ext_proc.ProcessingRequest()
    if hint is not None:
        request.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    assert subset_of(subset_value(request)) == subset


@pytest.mark.parametrize("value", [7.0, {"a": "b"}, ["a:1", 2.0]])
def test_a_hint_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="subset"):
        subset_of(value)


def test_a_refusal_has_the_body_of_a_routers_own() -> None:
    answer = immediate(Overloaded("full", retry_after_s=2.2), 429).immediate_response
    assert answer.status.code == 429
    headers = {each.header.key: each.header.raw_value for each in answer.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"3"}
    assert b'"code": "overloaded"' in answer.body
