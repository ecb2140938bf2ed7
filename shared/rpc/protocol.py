"""The session protocol that this build speaks; router and worker must have the same version."""

from shared.errors import ModelMismatch

PROTOCOL_VERSION = 2
SESSION_SERVICE = "tandem.v1.WorkerService"
SESSION_METHOD = f"/{SESSION_SERVICE}/Session"
OLD_SESSION_SERVICES = ("tandem.v1.PrefillService", "tandem.v1.DecodeService")
"""Of protocol 1, a service for each role. Builds of it are refused with an `other_protocol`."""


def other_protocol(peer: str, version: int, own: str) -> ModelMismatch:
    """The error for `peer`, such as "router r0", which speaks another protocol than `own`, such as "this worker"."""
    return ModelMismatch(
        f"{peer} speaks session protocol {version}, {own} speaks {PROTOCOL_VERSION}: both must be of one version",
        field="protocol_version",
        limit=PROTOCOL_VERSION,
    )
