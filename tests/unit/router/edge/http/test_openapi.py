"""The OpenAPI document says what the parser takes."""

from __future__ import annotations

import json
import re

from services.router.edge.http.openai.completions import CompletionRequest
from services.router.edge.http.openai.schemas import ChatRequest
from services.router.edge.http.pages.openapi import openapi_document


def test_it_has_every_field_of_both_requests_and_no_open_reference() -> None:
    raw = openapi_document("acme/tiny", "1.2.3").decode()
    document = json.loads(raw)
    schemas = document["components"]["schemas"]
    for schema in (CompletionRequest, ChatRequest):
        assert schemas[schema.__name__]["properties"].keys() == schema.model_fields.keys()
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', raw))
    assert {"CompletionRequest", "ChatRequest", "Message", "Error"} <= references <= schemas.keys()
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "401", "408", "413", "415", "429", "431", "503"} <= responses.keys()
