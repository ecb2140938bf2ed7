"""The session protocol and the sampler that this build has; router and worker must have the same versions."""

from shared.errors import ModelMismatch
from shared.seeds import SAMPLER_VERSION

PROTOCOL_VERSION = 2
SESSION_SERVICE = "tandem.v1.WorkerService"
SESSION_METHOD = f"/{SESSION_SERVICE}/Session"
OLD_SESSION_SERVICES = ("tandem.v1.PrefillService", "tandem.v1.DecodeService")
"""Services of protocol 1, one for each role. Builds of it are refused with an `other_protocol`."""


def other_protocol(peer: str, version: int, own: str) -> ModelMismatch:
    """The error for `peer`, such as "router r0", which speaks another protocol than `own`, such as "this worker"."""
    return ModelMismatch(
        f"{peer} speaks session protocol {version}, {own} speaks {PROTOCOL_VERSION}: both must be of one version",
        field="protocol_version",
        limit=PROTOCOL_VERSION,
    )


def other_sampler(peer: str, version: int, own: str) -> ModelMismatch:
    """The error for `peer`, whose sampler has another version (0: not named) than that of `own`."""
    return ModelMismatch(
        f"{peer} has sampler version {version or 1}, {own} has {SAMPLER_VERSION}: a sampled answer cannot go from one "
        "to the other, so both must be of one version",
        field="sampler_version",
        limit=SAMPLER_VERSION,
    )
