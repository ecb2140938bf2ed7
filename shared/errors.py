"""The one tree of errors that users of Tandem can see.

    TandemError
    ├── InvalidRequest        400  the request breaks a stated limit
    │   ├── PromptTooLong     400  prompt or prompt + max_tokens does not fit
    │   └── RequestRunning    409  a request of this id runs already
    ├── Unauthenticated       401  no key, or an unknown one
    ├── NotFound              404  what does not exist here
    │   └── ModelNotFound          a model that is not served
    ├── QuotaExceeded         429  the tenant's share is used up
    ├── Overloaded            429  refused at once rather than served late; carries `retry_after_s`
    │   └── Draining          503  this process is about to end; another one takes the request
    ├── DeadlineExceeded      504  the request's own deadline passed
    ├── Cancelled             499  the client went away
    ├── TakenOver             409  the client continues the request on another call
    ├── ModelMismatch         500  a worker serves another model or block layout
    ├── TransferFailed        503  KV blocks did not arrive complete
    │   └── PeerUnreachable   503  … because nothing passes between two workers that both live
    ├── WorkerLost            503  a worker's session broke
    │   ├── WorkerDied        503  … because its process ended
    │   └── RankLost          503  … a rank of its group died, or is stuck
    ├── Quarantined           422  the request was present when two workers died
    ├── StoreUnavailable      503  the index or a tier does not answer
    ├── ClusterUnavailable    503  the Kubernetes API server does not answer, or not as it should
    │   └── ClusterForbids    503  … it refuses the call: RBAC or the token
    ├── ModelLoadError        500  the model folder cannot be served (start-up)
    ├── ConfigError           500  a setting is out of bounds (start-up)
    ├── NumericalFault        500  the model gave NaN or infinite numbers for this request
    └── Internal              500  a bug in Tandem

Each class states its gRPC status code (by name, so that this module needs no grpc), its HTTP status and the
`type`/`code` pair of an OpenAI-shaped error body. `details` names the field and the limit that was exceeded.
"""

from __future__ import annotations

from typing import ClassVar

Detail = str | int | float | bool | None


class TandemError(Exception):
    """Base of all errors; `details` are plain scalars such as `field=`, `limit=`, `value=`."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    """Whether the router may try another worker without the client noticing."""

    def __init__(self, message: str, **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Detail] = {k: v for k, v in details.items() if v is not None}

    @property
    def field(self) -> str | None:
        """The request field or setting at fault, if there is one."""
        value = self.details.get("field")
        return value if isinstance(value, str) else None

    def __str__(self) -> str:
        return self.message


class InvalidRequest(TandemError):
    """The request is malformed or breaks a stated limit."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_value"


class PromptTooLong(InvalidRequest):
    """The prompt, or prompt plus max_tokens, exceeds the model's or the pool's limit."""

    code = "context_length_exceeded"


class RequestRunning(InvalidRequest):
    """A request of this id runs already. A client that lost its connection to it sends `resume` to take it over."""

    grpc_code = "ALREADY_EXISTS"
    http_status = 409
    code = "request_running"


class Unauthenticated(TandemError):
    """No credentials, or unknown ones."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class NotFound(TandemError):
    """The named resource is not here."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    error_type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """No model of that name is served here."""

    code = "model_not_found"


class QuotaExceeded(TandemError):
    """The tenant has used up its share."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    error_type = "rate_limit_error"
    code = "quota_exceeded"


class Overloaded(TandemError):
    """Refused now rather than served late; `retry_after_s` says when to come back."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    error_type = "rate_limit_error"
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Detail) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)
        self.retry_after_s = retry_after_s


class Draining(Overloaded):
    """The process takes no new work because it is about to end."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    error_type = "server_error"
    code = "draining"


class DeadlineExceeded(TandemError):
    """The deadline of the request or of a command passed."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    error_type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(TandemError):
    """The client disconnected or cancelled; visible only in logs and metrics."""

    grpc_code = "CANCELLED"
    http_status = 499
    error_type = "invalid_request_error"
    code = "cancelled"


class TakenOver(TandemError):
    """The client continues this request on another call: this one is over."""

    grpc_code = "ABORTED"
    http_status = 409
    error_type = "invalid_request_error"
    code = "taken_over"


class ToolServerFailed(TandemError):
    """An MCP server that the request names does not answer, or not as the protocol has it."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 424
    code = "tool_server_failed"


class ModelMismatch(TandemError):
    """A worker's model or block layout differs from the cluster's."""

    code = "model_mismatch"
    grpc_code = "FAILED_PRECONDITION"


class TransferFailed(TandemError):
    """KV blocks did not arrive complete."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    code = "transfer_failed"
    retryable = True


class PeerUnreachable(TransferFailed):
    """What one worker has sent does not arrive at another one, although both are alive: the network between them is
    cut."""

    code = "peer_unreachable"


class WorkerLost(TandemError):
    """A worker's session broke, or no worker of the needed role is up."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    code = "worker_lost"
    retryable = True


class WorkerDied(WorkerLost):
    """A worker's process ended while it served: it was neither draining nor given up for its silence."""


class RankLost(WorkerLost):
    """A rank of a worker's group died or is stuck, so the whole group ends. `rank` names it."""


class Quarantined(TandemError):
    """The request was present when two workers died, and may have caused it: it is not given to a third. The status is
    one that clients do not repeat by themselves. `request_id`, and `workers`: the two names, comma-separated."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 422
    error_type = "invalid_request_error"
    code = "request_quarantined"


class StoreUnavailable(TandemError):
    """The KV store or its Redis does not answer."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    code = "store_unavailable"


class ClusterUnavailable(TandemError):
    """The Kubernetes API server does not answer, or not as it should. Requests are served without it."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    code = "cluster_unavailable"


class ClusterForbids(ClusterUnavailable):
    """The Kubernetes API server refuses the call: the service account lacks a right, or its token is not valid."""

    code = "cluster_forbids"


class ModelLoadError(TandemError):
    """The model folder cannot be served: missing, unsupported or corrupt."""

    code = "model_load_error"
    grpc_code = "FAILED_PRECONDITION"


class ConfigError(TandemError):
    """A setting is out of bounds; `field` names it."""

    code = "config_error"
    grpc_code = "FAILED_PRECONDITION"


class NumericalFault(TandemError):
    """The model gave NaN or infinite logits for this request: no token can be sampled, and another worker would not do
    better. `position` is the token's position, `source` the part of the model, if it was located."""

    code = "numerical_fault"


class Internal(TandemError):
    """A bug in Tandem: never the client's fault."""


def brief(text: str, max_len: int = 400) -> str:
    """`text` without its middle where it is long: what a client sent is quoted in messages, and these travel in headers
    of a few KiB."""
    return text if len(text) <= max_len else f"{text[: max_len * 3 // 4]} … {text[-max_len // 4 :]}"


def brief_bytes(text: str, max_bytes: int) -> str:
    """As `brief`, by the bytes of the text in UTF-8. What UTF-8 cannot express becomes question marks."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    gap = " … "
    room = max_bytes - len(gap.encode())
    tail = room // 4
    head, end = encoded[: room - tail], encoded[len(encoded) - tail :]
    return head.decode(errors="ignore") + gap + end.decode(errors="ignore")


def error_classes() -> dict[str, type[TandemError]]:
    """All classes by name: how an error that crossed a session becomes an exception again."""
    found: dict[str, type[TandemError]] = {}
    pending: list[type[TandemError]] = [TandemError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return found
