"""Schemathesis against the HTTP API's OpenAPI document: what the document allows, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.campaign import Edge, Findings
from tests.waiting import DEADLINE_S

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
MOST_FOR_A_PAGE = 100
"""Cases of a page without a body: it has few parameters or none."""


def fuzz_schema(edge: Edge, num_cases: int, found: Findings) -> None:
    """Every operation of the document with requests that fit it and with such that do not. An answer that the document
    does not foresee is a failure: a status, a content type, a body."""
    schema = schemathesis.openapi.from_url(f"http://{edge.http}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    pages = [each for each in operations if not each.body]
    answers = [each for each in operations if each.body]
    for_a_page = min(MOST_FOR_A_PAGE, num_cases // (2 * len(operations)) or 1)
    for_an_answer = max(1, (num_cases - for_a_page * len(pages)) // (2 * len(answers)))
    with requests.Session() as session:
        for mode in MODES:
            for operation in operations:
                if mode is schemathesis.GenerationMode.NEGATIVE and operation in pages:
                    continue  # it takes nothing, or any text
                count = for_an_answer if operation in answers else for_a_page
                _try(operation, mode, count, lambda case: _call(case, session, found))


def _try(operation: Any, mode: schemathesis.GenerationMode, num_cases: int, run: Callable[[Any], None]) -> None:
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def every(case: Any) -> None:
        run(case)

    every()


def _call(case: Any, session: requests.Session, found: Findings) -> None:
    try:
        answer = case.call(session=session, timeout=DEADLINE_S)
    except requests.RequestException as error:
        found.failed(case.as_curl_command(), repr(error))
        return
    found.outcomes[f"schema {answer.status_code}"] += 1
    try:
        case.validate_response(answer, checks=CHECKS)
    except (Failure, FailureGroup) as error:
        why = "; ".join(each.title for each in getattr(error, "exceptions", [error]))
        found.failed(case.as_curl_command(), f"{answer.status_code} {why}: {answer.content[:300]!r}")
