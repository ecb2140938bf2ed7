"""The environment's `TANDEM_*` variables: a misspelt one is an error, for it would change nothing without a word."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import AliasChoices, BaseModel
from pydantic_settings import BaseSettings

from shared.errors import ConfigError

PREFIX = "TANDEM_"
SERVICE_PREFIXES = ("TANDEM_ROUTER_", "TANDEM_WORKER_", "TANDEM_KVSTORE_", "TANDEM_PLANNER_", "TANDEM_VALKEY_")
"""What the variables of each service begin with. A service judges its own, and those that are no service's."""
OTHER_VARIABLES = frozenset(
    {
        "TANDEM_API_KEY",
        "TANDEM_TARGET",
        *(f"TANDEM_{name}" for name in ("TLS", "CA", "CERT", "KEY", "SERVER_NAME")),
        "TANDEM_CPU_ISA",
        "TANDEM_HEALTH_URLS",
        *(f"TANDEM_PREFLIGHT_{name}" for name in ("MODEL", "DEVICE", "REDIS_URL", "RDMA", "PEER", "WAIT")),
        # Read by tests, by load tests that start clusters, and by what the chart runs beside the services.
        *("TANDEM_URL", "TANDEM_MODEL", "TANDEM_ENVOY", "TANDEM_CHAOS_OUTER_NETWORK"),
    }
)
"""Variables that are no service's."""

_LINK_NAME = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_[A-Z]+_(ADDR|PORT|PROTO)$")
"""Names of variables that Kubernetes adds for a Service named tandem…, where a Pod's service links are on."""
_LINK_URL = re.compile(r"^(tcp|udp|sctp)://")
"""How the values of the other variables of such a Service begin, `…_PORT` and `…_PORT_80_TCP`."""


def check_variables(classes: Iterable[type[BaseSettings]], environment: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for a `TANDEM_*` variable that is none of these classes' settings, no other service's and none
    of `OTHER_VARIABLES`; the error names the nearest known one. An empty value does not excuse a wrong name.
    `environment`: the process's own where None."""
    classes = tuple(classes)
    environment = os.environ if environment is None else environment
    own = tuple(str(cls.model_config.get("env_prefix", "")) for cls in classes)
    foreign = tuple(prefix for prefix in SERVICE_PREFIXES if prefix not in own)
    known, open_ended = set(OTHER_VARIABLES), set[str]()
    for cls in classes:
        for name, is_open in _variables(cls):
            known.add(name)
            if is_open:
                open_ended.add(f"{name}__")
    for name, value in environment.items():
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in known:
            continue
        if upper.startswith((*foreign, *open_ended)) or _is_service_link(upper, value):
            continue
        raise ConfigError(_unknown(name, known), field=name)


def _unknown(name: str, known: Iterable[str]) -> str:
    nearest = get_close_matches(name.upper(), known, n=1, cutoff=0.75)
    hint = f"did you mean {nearest[0]}?" if nearest else "docs/reference.md has those that exist"
    return f"environment variable {name} is no setting: {hint}"


def _is_service_link(name: str, value: str) -> bool:
    return bool(_LINK_NAME.search(name) or _LINK_URL.match(value))


def _variables(cls: type[BaseSettings]) -> Iterator[tuple[str, bool]]:
    """(name, whether names of one's own may follow behind two underscores) of each setting and of each part's whole."""
    prefix = str(cls.model_config.get("env_prefix", ""))
    for path, is_open in _paths(cls, ()):
        yield prefix + "__".join(path).upper(), is_open
    for old in getattr(cls, "renamed", {}):
        yield prefix + old.replace(".", "__").upper(), False
    for field in cls.model_fields.values():
        if isinstance(alias := field.validation_alias, AliasChoices):
            yield from ((str(choice).upper(), False) for choice in alias.choices)


def _paths(cls: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], bool]]:
    for name, field in cls.model_fields.items():
        here = (*path, name)
        yield here, _is_mapping(field.annotation)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _paths(inner, here)


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Mapping)
