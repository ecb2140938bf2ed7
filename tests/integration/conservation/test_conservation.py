"""10,000 calls of every kind through a whole router: what it counts is what its clients saw, each request once.

The router is composed as its process does it; its workers answer within the process and its clients call ASGI and the
gRPC servicer directly, so that all of it takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter

import pytest

from services.router.edge.catalog import Catalog
from services.router.edge.grpc.servicer import InferenceServicer
from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared.engine.finish_reason import FinishReason
from shared.errors import NumericalFault, TransferFailed, error_classes
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.seeds import derived_seed
from tests.demo import DEMO
from tests.integration.conservation.clients import Seen, over_grpc, over_http
from tests.integration.conservation.workers import Script, Workers

NUM_CALLS = 10_000
NUM_AT_ONCE = 24
DEADLINE_S = 1100.0
MAX_BODY_BYTES = 4096
KINDS = {
    "finished": 30,
    "stop string": 12,
    "cancelled": 14,
    "bad value": 6,
    "bad json": 3,
    "bad key": 3,
    "bad model": 4,
    "bad id": 3,
    "too large": 3,
    "over its rate": 5,
    "failed": 5,
    "retried": 8,
    "given up": 4,
}
AT_THE_DOOR = {
    *("invalid_value", "invalid_api_key", "model_not_found", "quota_exceeded"),
    *("INVALID_ARGUMENT", "UNAUTHENTICATED", "NOT_FOUND"),
}
"""Errors of calls that are refused before it is known how many answers they ask for."""


class Calls:
    """Draws calls, and knows what must be counted of each."""

    def __init__(self, service: RouterService, seed: int) -> None:
        self._random = random.Random(seed)
        (model,) = service._models
        self._tokenizer = model.edge.tokenizer
        self._app = service.http._app
        self._servicer = InferenceServicer(
            model.edge,
            Catalog([model.edge]),
            service._settings.edge,
            service._observer.status,
            service._explain,
            service._request_info,
            access=service._access,
        )
        self.scripts: dict[int, Script] = {}
        self.text = self._tokenizer.encode("One, two, three and then the END of all this.", add_special_tokens=False)
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.num_http = self.num_grpc = self.num_retried = 0

    async def one(self, number: int) -> None:
        kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
        grpc = self._random.random() < 0.4 and kind not in ("bad json", "too large")
        n = 1 if grpc or self._random.random() < 0.9 or kind in ("cancelled", "retried", "given up") else 2
        num_failures = {"failed": 1, "retried": self._random.choice((1, 2)), "given up": 3}.get(kind, 0)
        seeds = [number] if n == 1 else [derived_seed(number, i) for i in range(n)]
        for seed in seeds:
            self.scripts[seed] = self._script(kind, num_failures)
        leave_after = self._random.randrange(4) if kind == "cancelled" else None
        seen = await (self._grpc if grpc else self._http)(kind, number, n, leave_after)
        self.kinds[kind] += 1
        self._count(kind, n, seen)
        if kind in ("retried", "given up") and seen.code not in ("overloaded", "RESOURCE_EXHAUSTED"):
            self.num_retried += min(num_failures, 2)

    def _script(self, kind: str, num_failures: int) -> Script:
        num = self._random.randint(4, len(self.text))
        error = NumericalFault("broken") if kind == "failed" else TransferFailed("lost")
        if kind in ("cancelled", "stop string"):
            return Script(tuple(self.text), None)
        finish = self._random.choice((FinishReason.STOP, FinishReason.LENGTH))
        return Script(
            tuple(self.text[:num]), finish, error, num_failures, kind == "given up", self._random.randrange(5)
        )

    async def _http(self, kind: str, number: int, n: int, leave_after: int | None) -> Seen:
        self.num_http += 1
        stream = leave_after is not None or self._random.random() < 0.5
        body: dict[str, object] = {"seed": number, "n": n, "max_tokens": 400, "temperature": 0.0, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        chat = self._random.random() < 0.5
        body |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hello there"}
        if kind == "stop string":
            body["stop"] = ["END"]
        elif kind == "bad value":
            body["temperature"] = -5
        elif kind == "bad model":
            body["model"] = "nobody's"
        data = b"{" if kind == "bad json" else json.dumps(body).encode()
        if kind == "too large":
            data += b" " * MAX_BODY_BYTES
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return await over_http(self._app, path, data, self._headers(kind, number), leave_after)

    async def _grpc(self, kind: str, number: int, n: int, leave_after: int | None) -> Seen:
        self.num_grpc += 1
        request = inference_pb2.GenerateRequest(text="Hello there")
        request.sampling.seed, request.sampling.max_tokens, request.sampling.temperature = number, 400, 0.0
        if kind == "stop string":
            request.sampling.stop.append("END")
        elif kind == "bad value":
            request.sampling.temperature = -5
        elif kind == "bad model":
            request.model = "nobody's"
        elif kind == "bad id":
            request.request_id = "two words"
        return await over_grpc(self._servicer, request, self._headers(kind, number), leave_after)

    def _headers(self, kind: str, number: int) -> dict[str, str]:
        key = {"bad key": "wrong", "over its rate": "slow"}.get(kind, "right")
        more = {"x-request-id": "two words"} if kind == "bad id" else {}
        return {"authorization": f"Bearer {key}", "content-type": "application/json", **more}

    def _count(self, kind: str, n: int, seen: Seen) -> None:
        if seen.code:
            self.outcomes[seen.code] += 1 if seen.code in AT_THE_DOOR else n
        elif seen.left:
            self.outcomes["cancelled"] += n
        else:
            assert len(seen.reasons) == n, (kind, seen)
            assert kind in ("finished", "stop string", "retried", "over its rate"), (kind, seen)
            self.outcomes["finished"] += n
            self.reasons.update(seen.reasons)
            self.tokens["prompt"] += seen.num_prompt * n
            self.tokens["output"] += seen.num_output


def samples(page: str, name: str, label: str = "") -> Counter[str]:
    """A metric's samples by one label's value."""
    found: Counter[str] = Counter()
    for labels, value in re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE):
        part = re.search(rf'(?:^|,){label}="([^"]*)"', labels) if label else None
        found[part[1] if part else ""] += float(value)
    return found


def by_status(outcomes: Counter[str]) -> Counter[str]:
    """Outcomes by gRPC status where both kinds of clients have to be compared."""
    names = {code: cls.grpc_code for code, cls in error_classes_by_code().items()}
    found: Counter[str] = Counter()
    for outcome, count in outcomes.items():
        found[names.get(outcome, outcome)] += round(count)
    return +found


def error_classes_by_code():
    return {cls.code: cls for cls in reversed(error_classes().values())}


@pytest.mark.slow
async def test_every_request_is_counted_once_whatever_becomes_of_it() -> None:
    settings = RouterSettings(
        model=DEMO,
        prefill="p0=127.0.0.1:1,p1=127.0.0.1:2",
        decode="d0=127.0.0.1:3,d1=127.0.0.1:4",
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        queue_limit=3,
        edge={
            "api_keys": ["right"],
            "tenants": {"slow": {"api_keys": ["slow"], "requests_per_minute": 1}},
            "max_body_bytes": MAX_BODY_BYTES,
        },
    )
    service = RouterService(settings)
    (model,) = service._models
    calls = Calls(service, seed=5)
    model.fleet.start()
    Workers(model.fleet, calls.scripts)
    async with asyncio.timeout(DEADLINE_S):
        while model.dispatcher.not_ready_reason() or not all(link.connected for link in model.fleet.links):
            await asyncio.sleep(0.01)
        numbers = iter(range(1, NUM_CALLS + 1))

        async def client() -> None:
            for number in numbers:
                await calls.one(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(client())
        while model.dispatcher.num_active:
            await asyncio.sleep(0.01)
    page = service._metrics_page().decode()
    check(page, calls)
    await model.close()


def check(page: str, calls: Calls) -> None:
    assert set(calls.kinds) == set(KINDS)
    outcomes = samples(page, "tandem_requests_total", "outcome")
    num_requests = sum(calls.outcomes.values())
    assert sum(outcomes.values()) == num_requests >= NUM_CALLS
    assert by_status(outcomes) == by_status(calls.outcomes)
    assert outcomes["overloaded"] > 0, "none was refused by admission"
    # A call for two answers whose second one is refused has neither.
    assert 0 < samples(page, "tandem_refusals_total", "cause")["full"] <= outcomes["overloaded"]
    # Answers.
    assert +samples(page, "tandem_finished_requests_total", "reason") == calls.reasons
    tokens = samples(page, "tandem_tokens_total", "kind")
    assert (tokens["prompt"], tokens["output"]) == (calls.tokens["prompt"], calls.tokens["output"])
    places = samples(page, "tandem_prefix_tokens_total", "place")
    assert sum(places.values()) == tokens["prompt"]
    assert places["local"] == tokens["cached"]
    # Histograms count the same requests.
    finished = outcomes["finished"]
    for name in ("gen_ai_server_time_to_first_token_seconds", "tandem_queue_seconds", "tandem_request_output_tokens"):
        assert samples(page, f"{name}_count") == {"": finished}
    durations = samples(page, "gen_ai_server_request_duration_seconds_count", "error_type")
    assert durations == Counter({"" if name == "finished" else name: n for name, n in outcomes.items() if n})
    parts, ttft = (
        samples(page, "tandem_ttft_part_seconds_total"),
        samples(page, "gen_ai_server_time_to_first_token_seconds_sum"),
    )
    assert parts[""] == pytest.approx(ttft[""], rel=0.01)
    # Tries, calls, and what is left.
    assert samples(page, "tandem_retries_total", "cause")["transfer_failed"] == calls.num_retried
    assert sum(samples(page, "tandem_http_requests_total").values()) == calls.num_http
    assert sum(samples(page, "tandem_grpc_calls_total").values()) == calls.num_grpc
    assert sum(samples(page, "tandem_router_waiting_requests").values()) == 0
    assert sum(samples(page, "tandem_router_running_requests").values()) == 0
