"""The fingerprints by which workers of one fleet know that they compute the same."""

from __future__ import annotations

from hashlib import blake2b

_MARK = "-deterministic-"
_HEAD = "-head"


def headed_fingerprint(model: str, head: str = "") -> str:
    """Fingerprint of a model whose blocks have the KV of its head too: no block of it is one without. `head`: the
    fingerprint of a head that has a folder of its own."""
    return f"{model}{_HEAD}{head}"


def deterministic_fingerprint(model: str, arithmetic: str) -> str:
    """Fingerprint of a model in deterministic mode: blocks and tokens of another arithmetic are those of another
    model."""
    return f"{model}{_MARK}{arithmetic}"


def weights_digest(fingerprint: str) -> int:
    """64 bits that stand for a fingerprint in commands, never 0."""
    return int.from_bytes(blake2b(fingerprint.encode(), digest_size=8).digest(), "little") or 1


def system_fingerprint(fingerprint: str) -> str:
    """What answers call the weights by, in OpenAI's member of that name."""
    return f"fp_{fingerprint[:12]}"


def difference(worker: str, fleet: str) -> str:
    """Why a worker of one fingerprint cannot serve beside workers of another, for the operator."""
    (model, _, ours), (fleet_model, _, theirs) = worker.partition(_MARK), fleet.partition(_MARK)
    (base, own, head), (fleet_base, its, fleet_head) = model.partition(_HEAD), fleet_model.partition(_HEAD)
    if own != its:
        return f"runs {'with' if own else 'without'} speculation heads, the fleet {'without' if own else 'with'} it"
    if base == fleet_base and head != fleet_head:
        return f"guesses by head {head or 'of its model'}, the fleet by {fleet_head or 'that of its model'}"
    if model != fleet_model or ours == theirs:
        return f"serves model {worker}, the fleet {fleet}"
    if not ours or not theirs:
        return f"runs {'with' if ours else 'without'} deterministic, the fleet {'with' if theirs else 'without'} it"
    return (
        f"computes model {model} in other bits ({ours}) than the fleet ({theirs}): with deterministic, all workers "
        "need processors that compute alike, or one cpu_isa that they all have"
    )
