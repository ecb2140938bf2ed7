"""What is read from and written into ext-proc messages."""

from __future__ import annotations

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.json_format import MessageToDict

from services.router.picker.ext_proc import destination, headers_of, immediate, subset_value
from services.router.picker.picker import subset_of
from shared.errors import InvalidRequest, Overloaded


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
