"""Validation at the edge: `tandem.v1` messages in, own types out, or an InvalidRequest that names the field."""

from __future__ import annotations

from services.kvstore.tiers.disk import MAX_TENANT_BYTES
from services.kvstore.tiers.order import Keep
from services.kvstore.tiers.pins import Pin
from shared.errors import InvalidRequest
from shared.identity import WorkerIdentity, WorkerRole
from shared.kv_index.holders import EventStamp, Tier, split_hashes
from shared.rpc.convert import role_from_proto
from shared.rpc.pb.tandem.v1 import kvstore_pb2, types_pb2

MAX_NAME_BYTES = 256
MAX_RETAIN_S = 7 * 86_400.0
MAX_SEQUENCE = 2**53 - 1
"""Largest integer that Redis's Lua represents exactly."""


def name_of(worker: types_pb2.WorkerId) -> str:
    """The worker's name, not empty and not too long."""
    if not worker.name:
        raise InvalidRequest("worker.name must not be empty", field="worker.name", limit=1)
    if len(worker.name.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(
            f"worker.name is longer than {MAX_NAME_BYTES} bytes", field="worker.name", limit=MAX_NAME_BYTES
        )
    return worker.name


def incarnation_of(worker: types_pb2.WorkerId) -> int:
    """The worker's incarnation. 0 means that the message does not set it."""
    if worker.incarnation == 0:
        raise InvalidRequest("worker.incarnation must be set and not 0", field="worker.incarnation", limit=1)
    return worker.incarnation


def keep_of(request: kvstore_pb2.OfferRequest) -> Keep:
    """How long the offered blocks are wanted."""
    if not 0 <= request.retain_s <= MAX_RETAIN_S:
        raise InvalidRequest(
            f"retain_s must be between 0 and {MAX_RETAIN_S:g}, got {request.retain_s:g}",
            field="retain_s",
            limit=MAX_RETAIN_S,
        )
    return Keep(request.retain_s, request.is_low)


def tier_of(message: kvstore_pb2.PublishRequest | kvstore_pb2.RemoveRequest) -> Tier:
    """The request's tier; unknown ones are refused."""
    try:
        return Tier(message.tier)
    except ValueError as error:
        raise InvalidRequest(
            f"tier must be one of {', '.join(tier.name for tier in Tier)}, got number {message.tier}",
            field="tier",
        ) from error


def stamp_of(message: kvstore_pb2.PublishRequest | kvstore_pb2.RemoveRequest) -> EventStamp:
    """The change's position in its series."""
    if message.sequence > MAX_SEQUENCE or message.acknowledged > message.sequence:
        raise InvalidRequest(
            f"sequence must be at most {MAX_SEQUENCE} and not below acknowledged, got {message.sequence} and "
            f"{message.acknowledged}",
            field="sequence",
            limit=MAX_SEQUENCE,
        )
    reset = isinstance(message, kvstore_pb2.PublishRequest) and message.reset
    return EventStamp(message.sequence, message.acknowledged, reset)


def publisher_of(message: kvstore_pb2.PublishRequest) -> WorkerIdentity:
    """The worker that publishes."""
    try:
        role = role_from_proto(message.role)
    except ValueError as error:
        raise InvalidRequest(
            f"role must be one of {', '.join(role.name for role in WorkerRole)}, got number {message.role}",
            field="role",
        ) from error
    return WorkerIdentity(name_of(message.worker), incarnation_of(message.worker), role)


def remover_of(message: kvstore_pb2.RemoveRequest) -> WorkerIdentity:
    """The worker that removes; its registered role does not change."""
    return WorkerIdentity(name_of(message.worker), incarnation_of(message.worker), WorkerRole.PREFILL)


def tenant_of(message: kvstore_pb2.OfferRequest | kvstore_pb2.PinRequest) -> str:
    """The tenant whose blocks the request is about; empty = no tenant."""
    check_tenant(message.tenant)
    return message.tenant


def check_tenant(tenant: str) -> None:
    """Raises InvalidRequest for an invalid tenant name."""
    if len(tenant.encode()) > MAX_TENANT_BYTES or "\0" in tenant:
        raise InvalidRequest(
            f"tenant must have at most {MAX_TENANT_BYTES} bytes, none of them 0", field="tenant", limit=MAX_TENANT_BYTES
        )


def pin_name_of(message: kvstore_pb2.PinRequest | kvstore_pb2.UnpinRequest) -> str:
    """The pin's name, not empty and not too long."""
    if not 0 < len(message.name.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest(
            f"name must have 1 to {MAX_NAME_BYTES} bytes, it has {len(message.name.encode())}",
            field="name",
            limit=MAX_NAME_BYTES,
        )
    return message.name


def pin_of(message: kvstore_pb2.PinRequest) -> Pin:
    """A pin of at least one block."""
    hashes = split_hashes(message)
    if not hashes:
        raise InvalidRequest("block_hashes must not be empty", field="block_hashes", limit=1)
    return Pin(pin_name_of(message), tenant_of(message), tuple(hashes), message.block_bytes)
