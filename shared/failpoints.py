"""Faults on demand, for chaos tests: a hung or failing engine, a late or lost session message, a UCX standstill.

A process has failpoints only where its setting `failpoints` names them (`engine.step=hang:20,session.send=drop`), and
refuses to start where `production` is set beside it. SIGUSR1 arms all that are named. `ucx.send=hang@9` lets nine
visitors pass first.

This is the one module with state of its own: the parts that break must not know what arms them. Where nothing is
armed, a point costs one look at `armed`:

    if failpoints.armed:
        failpoints.strike(failpoints.ENGINE_STEP)
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shared.errors import ConfigError

logger = logging.getLogger(__name__)

_NAP_S = 0.05
_FOR_EVER_S = 1e6

ENGINE_STEP = "engine.step"
"""Before the engine thread plans a step: hang, raise."""
SESSION_SEND = "session.send"
"""Before a worker writes one message to a router: hang, raise, drop."""
ENGINE_TOKEN = "engine.token"
"""Where an engine is given a sequence that holds a certain token id: exit, as a fault in native code would end it."""
UCX_SEND = "ucx.send"
"""Before a block or trailer leaves over UCX: hang, raise."""
ADAPTER_READ = "adapter.read"
"""Before a worker reads an adapter's folder: hang, raise."""

Kind = Literal["hang", "raise", "drop", "exit"]
KINDS: Mapping[str, tuple[Kind, ...]] = {
    ENGINE_STEP: ("hang", "raise"),
    SESSION_SEND: ("hang", "raise", "drop"),
    UCX_SEND: ("hang", "raise"),
    ENGINE_TOKEN: ("exit",),
    ADAPTER_READ: ("hang", "raise"),
}
EXIT_STATUS = 70
"""Exit status of a process that the kind `exit` ended."""


class Injected(Exception):
    """What a failpoint of kind `raise` raises: an error of no known class, like a bug's."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a point."""

    kind: Kind
    seconds: float = math.inf
    """How long a hang lasts, from its arming on."""
    token_id: int = -1
    """What `exit` waits for."""
    num_spared: int = 0
    """Visitors that pass before it strikes."""


@dataclass(frozen=True, slots=True)
class Armed:
    """A fault that is about to strike."""

    kind: Kind
    until: float
    """End of a hang, by time.monotonic()."""
    token_id: int = -1
    num_spared: int = 0
    """Visitors that still pass."""


armed: dict[str, Armed] = {}
"""Armed faults by point. A hang holds every visitor until its end; the other kinds strike one."""


def parse(text: str) -> dict[str, Fault]:
    """`point=kind`, `point=hang:seconds` or `point=exit:token id`, each perhaps with `@visitors`, comma-separated.

    Raises ConfigError (`failpoints`).
    """
    faults: dict[str, Fault] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        point, _, what = entry.partition("=")
        what, _, spared = what.partition("@")
        kind, _, value = what.partition(":")
        if point not in KINDS or kind not in KINDS[point]:
            known = "; ".join(f"{name}={'|'.join(kinds)}" for name, kinds in KINDS.items())
            raise ConfigError(f"failpoints: {entry!r} is none of {known}", field="failpoints")
        if spared and not spared.isdecimal():
            raise ConfigError(f"failpoints: {entry!r} has no number of visitors behind '@'", field="failpoints")
        faults[point] = replace(_fault(_kind(kind), value), num_spared=int(spared or 0))
    return faults


def _fault(kind: Kind, value: str) -> Fault:
    try:
        if kind == "exit":
            return Fault(kind, token_id=int(value))
        return Fault(kind, float(value) if value else math.inf)
    except ValueError:
        what = "token id" if kind == "exit" else "number of seconds"
        raise ConfigError(f"failpoints: {value!r} is not a {what}", field="failpoints") from None


def _kind(text: str) -> Kind:
    return next(kind for kind in get_args(Kind) if kind == text)


def arm(faults: Mapping[str, Fault]) -> None:
    """Activates the faults: from now on each strikes calls that pass its point."""
    logger.warning("armed: %s", ", ".join(f"{point}={fault.kind}" for point, fault in faults.items()))
    now = time.monotonic()
    armed.update(
        {
            point: Armed(fault.kind, now + fault.seconds, fault.token_id, fault.num_spared)
            for point, fault in faults.items()
        }
    )


def strike(point: str) -> None:
    """In a thread that may block. Returns after a hang; raises Injected."""
    fault = _struck(point)
    while fault is not None and time.monotonic() < fault.until:
        time.sleep(_NAP_S)


def strike_token(token_ids: Sequence[int]) -> None:
    """Ends the process at ENGINE_TOKEN where the fault's token is among these."""
    fault = armed.get(ENGINE_TOKEN)
    if fault is not None and fault.token_id in token_ids:
        logging.shutdown()
        os._exit(EXIT_STATUS)


async def strike_async(point: str) -> bool:
    """On the event loop. True where the message is to be dropped; raises Injected."""
    fault = _struck(point)
    if fault is not None and fault.kind == "hang":
        await asyncio.sleep(min(max(0.0, fault.until - time.monotonic()), _FOR_EVER_S))
    return fault is not None and fault.kind == "drop"


def _struck(point: str) -> Armed | None:
    fault = armed.get(point)
    if fault is None:
        return None
    if fault.num_spared:
        armed[point] = replace(fault, num_spared=fault.num_spared - 1)
        return None
    if fault.kind != "hang" or time.monotonic() >= fault.until:
        armed.pop(point, None)
    logger.warning("failpoint %s: %s", point, fault.kind)
    if fault.kind == "raise":
        raise Injected(point)
    return fault


def check_allowed(text: str, *, production: bool) -> dict[str, Fault]:
    """The named faults. Raises ConfigError where there are any in production."""
    faults = parse(text)
    if faults and production:
        raise ConfigError("failpoints break this process on purpose: production refuses them", field="failpoints")
    return faults
