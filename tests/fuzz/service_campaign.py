"""Random messages to the services behind the router: sessions of workers, and blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from shared.rpc.pb.tandem.v1 import kvstore_pb2, types_pb2, worker_pb2
from shared.rpc.protocol import PROTOCOL_VERSION, SESSION_METHOD
from shared.seeds import SAMPLER_VERSION
from tests.fuzz.campaign import REFUSALS, Findings, each, spliced
from tests.fuzz.proto_messages import raw_messages
from tests.waiting import DEADLINE_S

SESSION_TIMEOUT_S = 5.0
MAX_COMMANDS = 6
NOT_NOW = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.CANCELLED}
"""Typed answers of a service that has no Redis, or another model."""


class Target(Protocol):
    """A worker or store node, wherever it runs."""

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""


def unary_methods(file: FileDescriptor, service: str) -> Mapping[str, Descriptor]:
    """Full path → request type of the methods that take one message."""
    found = file.services_by_name[service]
    return {
        f"/{found.full_name}/{method.name}": method.input_type
        for method in found.methods
        if not method.client_streaming
    }


BLOCKS = unary_methods(kvstore_pb2.DESCRIPTOR, "BlockService")
RECORDS = unary_methods(kvstore_pb2.DESCRIPTOR, "RecordService")


def fuzz_calls(service: Target, methods: Mapping[str, Descriptor], num_cases: int, found: Findings) -> None:
    """Single requests. Anything but an answer or a typed refusal is a failure."""
    cases = st.one_of(*(st.tuples(st.just(path), raw_messages(kind)) for path, kind in methods.items()))
    with grpc.insecure_channel(service.address) as channel:

        def run(case: tuple[str, bytes]) -> None:
            path, raw = case
            try:
                _ = list(channel.unary_stream(path)(raw, timeout=DEADLINE_S))
                found.outcomes[f"{path} OK"] += 1
            except grpc.RpcError as error:
                _judge(case, path, error, found)

        each(cases, num_cases, run, lambda a, b, rng: (a[0], spliced(a[1], b[1], rng)))
    if not service.alive:
        found.failed("the last calls", "the process ended")


def fuzz_sessions(service: Target, role: str, num_cases: int, found: Findings, spared: Collection[str] = ()) -> None:
    """Whole sessions: a hello, some commands, the end. The process must live, and greet the next router. A session that
    the worker leaves open is ended after a while, and counted. Commands named in `spared` are left out."""
    greeting = worker_pb2.Command(
        hello=types_pb2.Hello(
            router_name="a-fuzzer", protocol_version=PROTOCOL_VERSION, sampler_version=SAMPLER_VERSION
        )
    )
    hello = worker_pb2.Commands(commands=[greeting])
    cases = st.lists(raw_messages(worker_pb2.Commands.DESCRIPTOR), max_size=MAX_COMMANDS)
    with grpc.insecure_channel(service.address) as channel:

        def run(case: list[bytes]) -> None:
            def commands() -> Iterator[bytes]:
                yield hello.SerializeToString()
                yield from (raw for raw in case if not spared or not _kinds(raw) & set(spared))

            try:
                events = list(channel.stream_stream(SESSION_METHOD)(commands(), timeout=SESSION_TIMEOUT_S))
                found.outcomes[f"{role} session OK"] += 1
                if not events:
                    found.failed(case, "no welcome")
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # type: ignore[attr-defined]
                    found.outcomes[f"{role} session left open"] += 1
                else:
                    _judge(case, f"{role} session", error, found)

        each(cases, num_cases, run, lambda a, b, _: [*a[: len(a) // 2], *b[len(b) // 2 :]])
        run([])
    if not service.alive:
        found.failed("the last session", "the process ended")


def _kinds(raw: bytes) -> set[str | None]:
    """Which commands the bytes hold; none where they are no envelope."""
    try:
        return {command.WhichOneof("command") for command in worker_pb2.Commands.FromString(raw).commands}
    except DecodeError:
        return set()


def _judge(case: object, name: str, error: grpc.RpcError, found: Findings) -> None:
    code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
    found.outcomes[f"{name} {code.name}"] += 1
    undecodable = code is grpc.StatusCode.UNKNOWN and "DecodeError" in details
    if code not in REFUSALS | NOT_NOW and not undecodable:
        found.failed(case, f"{code} {details}")
