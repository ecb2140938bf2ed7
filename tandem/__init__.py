"""Tandem's Python client, synchronous and asynchronous: a lost router costs a stream a pause and nothing else.

    from tandem import TandemClient

    with TandemClient(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        for delta in client.stream("In the beginning", max_tokens=64):
            print(delta.text, end="", flush=True)

It speaks gRPC (`tandem.v1.InferenceService`). Its errors are `shared.errors`, of which the usual ones are here too.
"""

from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaExceeded,
    RequestRunning,
    TakenOver,
    TandemError,
    Unauthenticated,
    WorkerLost,
)
from tandem.aio import AsyncAnswerStream, AsyncTandemClient
from tandem.answer import Answer, Delta, TokenLogprobs
from tandem.client import AnswerStream, TandemClient
from tandem.connection import ClientTls
from tandem.options import Options

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncTandemClient",
    "Cancelled",
    "ClientTls",
    "DeadlineExceeded",
    "Delta",
    "InvalidRequest",
    "NotFound",
    "Options",
    "Overloaded",
    "QuotaExceeded",
    "RequestRunning",
    "TakenOver",
    "TandemClient",
    "TandemError",
    "TokenLogprobs",
    "Unauthenticated",
    "WorkerLost",
]
