"""Random input against a running edge while two ordinary streams go on."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.router.edge.http.weights import SleepBody, UpdateBody
from shared.rpc.pb.tandem.v1 import cache_pb2, fleet_pb2, inference_pb2
from tests.fuzz.json_values import BOUNDARY, Bodies, crossed, raw_forms, texts
from tests.fuzz.proto_messages import damaged, raw_messages
from tests.waiting import DEADLINE_S

NUM_DRAWN = 1500
"""Most cases of one kind that Hypothesis draws itself."""
SHARE_DRAWN = 0.2
"""Share of the cases that Hypothesis draws itself, but for the first hundred."""
PATHS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/messages/count_tokens": "CountRequest",
    "/v1/responses/input_tokens": "ResponseRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
    "/v1/responses": "ResponseRequest",
    "/v1/conversations": "ConversationRequest",
    "/v1/conversations/conv_1": "ConversationUpdate",
    "/v1/conversations/conv_1/items": "ItemsRequest",
    "/v1/batches": "BatchRequest",
    "/v1/embeddings": "EmbeddingRequest",
    "/v1/score": "ScoreRequest",
    "/v1/rerank": "RerankRequest",
    "/v1/cache/warm": "ChatRequest",
    "/v1/cache/close": "CloseRequest",
    "/v1/cache/expect": "ExpectRequest",
    "/v1/update_weights": "UpdateBody",
    "/sleep": "SleepBody",
    "/wake_up": "SleepBody",
}
OPERATORS = {model.__name__: model.model_json_schema() for model in (UpdateBody, SleepBody)}
"""Bodies that the OpenAPI document leaves out."""
METHODS = {
    f"/{service.full_name}/{name}": service.methods_by_name[name].input_type
    for service, names in (
        (
            inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
            "Generate GenerateBatch Tokenize Detokenize ListModels GetRequest GetStatus Explain"
            " Warm CloseSession ExpectSession",
        ),
        (
            cache_pb2.DESCRIPTOR.services_by_name["CacheService"],
            "GetCacheStats FlushCache PinPrefix UnpinPrefix",
        ),
        # Not Drain and Sleep, which are obeyed.
        (fleet_pb2.DESCRIPTOR.services_by_name["FleetService"], "LoadAdapter UnloadAdapter UpdateWeights WakeUp"),
    )
    for name in names.split()
}
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
Case = TypeVar("Case")


@dataclass(slots=True)
class Findings:
    """What came back."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_streams: int = 0  # ordinary ones that were complete and right

    def failed(self, case: object, why: object) -> None:
        self.failures.append(f"{why}: {case!r}"[:2000])


def each(
    strategy: st.SearchStrategy[Case],
    num_cases: int,
    run: Callable[[Case], None],
    cross: Callable[[Case, Case, random.Random], Case],
) -> None:
    """Calls `run` with that many cases: the first ones are drawn, and those behind them are crossed from two of these,
    which takes a hundredth of the time."""
    drawn: list[Case] = []

    @settings(
        max_examples=min(num_cases, NUM_DRAWN, max(100, int(SHARE_DRAWN * num_cases))),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every(case: Case) -> None:
        drawn.append(case)
        run(case)

    every()
    rng = random.Random(num_cases)
    for _ in range(num_cases - len(drawn)):
        run(cross(rng.choice(drawn), rng.choice(drawn), rng))


class Edge(Protocol):
    """Where clients connect: a router's, or an edge by itself."""

    @property
    def http(self) -> str:
        """host:port."""

    @property
    def grpc(self) -> str:
        """host:port."""


def fuzz_http(edge: Edge, num_cases: int, found: Findings) -> None:
    """Bodies and headers after the OpenAPI document. A status from 500 on is a failure, and so is a broken answer."""
    host, _, port = edge.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
    connection.request("GET", "/openapi.json")
    document = json.load(connection.getresponse())
    connection.request("GET", "/v1/models")
    document["components"]["schemas"] |= OPERATORS
    bodies = Bodies(document, json.load(connection.getresponse())["data"][0]["id"])
    header = st.sampled_from(["x-tenant", "x-priority", "x-session-id", "x-ttft-timeout-ms", "x-request-id", "expect"])
    value = st.sampled_from(["1", "-1", "a", "", "nan"]) | st.text(
        st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=10
    )
    headers = st.one_of(st.just({}), st.just({}), st.dictionaries(header, value, max_size=2))
    plain = st.tuples(st.just("/v1/completions"), st.just(b'{"prompt": "x", "max_tokens": 2}'), st.just({}))
    forms = st.tuples(
        st.just("/v1/files"), raw_forms, st.just({"content-type": f"multipart/form-data; boundary={BOUNDARY}"})
    )
    cases = st.one_of(
        plain, forms, *(st.tuples(st.just(path), bodies.raw(name), headers) for path, name in PATHS.items())
    )

    def run(case: tuple[str, bytes, dict[str, str]]) -> None:
        path, body, given_headers = case
        if path == "/sleep" and _sends_to_sleep(body):
            return
        try:
            connection.request("POST", path, body, given_headers)
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            found.failed(case, repr(error))
            return
        found.outcomes[f"http {answer.status}"] += 1
        if answer.status >= 500 or (answer.status >= 400 and "error" not in json.loads(raw)):
            found.failed(case, raw)
        if answer.will_close:
            connection.close()

    each(cases, num_cases, run, lambda a, b, rng: (a[0], crossed(a[1], b[1], rng), b[2]))
    connection.close()


def _sends_to_sleep(body: bytes) -> bool:
    """Whether it names no worker, which is all of them: that would be obeyed."""
    try:
        return not json.loads(body or b"{}").get("workers")
    except (ValueError, AttributeError):
        return False


def fuzz_wire(edge: Edge, num_cases: int, found: Findings) -> None:
    """Damaged HTTP on connections of their own: each is answered or closed, never held."""
    host, _, port = edge.http.rpartition(":")
    body = b'{"prompt": "a", "max_tokens": 1}'
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    chunked = b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n0\r\n\r\n'
    requests = st.sampled_from([whole, chunked, whole + whole])
    cases = st.one_of(
        st.binary(max_size=200), st.builds(damaged, requests, st.floats(0, 1), st.binary(min_size=1, max_size=8))
    )

    def run(case: bytes) -> None:
        try:
            with socket.create_connection((host, int(port)), DEADLINE_S) as client:
                client.sendall(case)
                client.shutdown(socket.SHUT_WR)
                answer = b""
                while piece := client.recv(65_536):
                    answer += piece
        except ConnectionError:
            found.outcomes["wire reset"] += 1
            return
        except OSError as error:
            found.failed(case, repr(error))
            return
        status = answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"
        found.outcomes[f"wire {status}"] += 1
        if status.startswith("5"):
            found.failed(case, answer)

    each(cases, num_cases, run, spliced)


def fuzz_grpc(edge: Edge, num_cases: int, found: Findings) -> None:
    """Messages of the client API, whole and damaged, with hints as metadata."""
    hint = st.sampled_from(["x-tenant", "x-priority", "x-session-id", "x-ttft-timeout-ms"])
    metadata = st.lists(
        st.tuples(hint, texts.map(lambda text: text.encode("ascii", "ignore").decode().strip())), max_size=1
    )
    cases = st.one_of(*(st.tuples(st.just(name), raw_messages(kind), metadata) for name, kind in METHODS.items()))
    with grpc.insecure_channel(edge.grpc) as channel:

        def run(case: tuple[str, bytes, list[tuple[str, str]]]) -> None:
            path, raw, hints = case
            printable = [(key, "".join(c for c in value if " " <= c <= "~")) for key, value in hints]
            try:
                _ = list(channel.unary_stream(path)(raw, metadata=printable, timeout=DEADLINE_S))
                found.outcomes["grpc OK"] += 1
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
                found.outcomes[f"grpc {code.name}"] += 1
                # gRPC's own answer to bytes that are no such message.
                if code not in REFUSALS and not (code is grpc.StatusCode.UNKNOWN and "DecodeError" in details):
                    found.failed(case, f"{code} {details}")

        # Messages behind each other are one that has the fields of both.
        each(
            cases,
            num_cases,
            run,
            lambda a, b, rng: (a[0], a[1] + b[1] if rng.random() < 0.5 else spliced(a[1], b[1], rng), b[2]),
        )


def spliced(one: bytes, other: bytes, rng: random.Random) -> bytes:
    """The beginning of one and the end of the other."""
    return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]
