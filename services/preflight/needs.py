"""The needs of each component, taken from the settings that it would start with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.kvstore.settings import KVStoreSettings
from services.preflight.component import Component
from services.preflight.model_folder import EngineNeed
from services.preflight.redis_server import RedisNeed
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.errors import InvalidRequest

FALLBACK_NAME = "preflight"
"""A worker's name does not matter here."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of the command; None = as the settings say."""

    model: Path | None = None
    device: str | None = None
    redis_url: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs of the checks; None, or an empty mapping, where the component does not need one."""

    engine: EngineNeed | None = None
    tokenizer: Path | None = None
    chat_template: str = ""
    """In place of the one in the tokenizer's folder; empty = that one."""
    redis: RedisNeed | None = None
    embedded_redis: bool = False
    """The server that comes with Tandem is started by the launcher."""
    disk: tuple[Path, int] | None = None
    """Folder and bytes of a disk tier."""
    transfers: bool = False
    """Blocks are sent and received."""
    fleet_key: str = field(default="", repr=False)
    ports: Mapping[str, str] = field(default_factory=dict)
    """host:port by setting."""


def needs_of(component: Component, overrides: Overrides, flags: Sequence[str], demo_model: Path) -> Needs:
    """`flags`: the component's own, as it would be started with; its environment variables are read as well.

    Raises ConfigError as the component would, InvalidRequest for flags of no component.
    """
    if component is Component.ALL:
        if flags:
            raise InvalidRequest("flags of a component need --component worker, router or kvstore", field="component")
        return _everything(overrides, demo_model)
    given = list(flags)
    if overrides.model is not None and component is not Component.KVSTORE:
        given += ["--model", str(overrides.model)]
    if component is Component.WORKER:
        return _worker(overrides, given)
    if component is Component.ROUTER:
        return _router(overrides, given)
    return _kvstore(overrides, given)


def _worker(overrides: Overrides, flags: list[str]) -> Needs:
    if overrides.device is not None:
        flags += ["--device", overrides.device]
    if not any(flag.partition("=")[0] == "--name" for flag in flags):
        flags += ["--name", FALLBACK_NAME]
    settings = load_settings(WorkerSettings, flags)
    return Needs(
        engine=EngineNeed(
            settings.model,
            settings.devices[0],
            settings.gpu_memory,
            settings.dtype,
            settings.quantization,
            settings.kv_dtype,
            settings.max_model_len,
            settings.num_kv_blocks,
            settings.block_size,
            settings.devices[1:] if settings.is_on_gpu else (),
            settings.group_hosts,
            settings.speculation == "heads",
            settings.head_folder,
            settings.adapter_slots if settings.has_adapters else 0,
            settings.adapter_bytes if settings.has_adapters else 0,
            settings.adapter_host_bytes if settings.has_adapters else 0,
        ),
        redis=_redis(overrides),
        transfers=True,
        fleet_key=settings.fleet_key.get_secret_value(),
        ports=_given(bind=settings.bind, metrics=settings.metrics),
    )


def _router(overrides: Overrides, flags: list[str]) -> Needs:
    settings = load_settings(RouterSettings, flags)
    return Needs(
        tokenizer=settings.model,
        chat_template=settings.chat_template,
        redis=_redis(overrides),
        ports=_given(http=settings.http, grpc=settings.grpc, picker=settings.picker.bind),
    )


def _kvstore(overrides: Overrides, flags: list[str]) -> Needs:
    if overrides.redis_url is not None:
        flags += ["--redis-url", overrides.redis_url]
    settings = load_settings(KVStoreSettings, flags)
    has_disk = settings.disk_folder is not None and settings.disk_bytes > 0
    return Needs(
        redis=RedisNeed(
            settings.redis_url.get_secret_value(),
            settings.redis_cluster,
            settings.redis_timeout_s,
            settings.redis_password.get_secret_value(),
        ),
        disk=(settings.disk_folder, settings.disk_bytes) if settings.disk_folder and has_disk else None,
        transfers=bool(settings.host_bytes or has_disk),
        fleet_key=settings.fleet_key.get_secret_value(),
        ports=_given(bind=settings.bind, metrics=settings.metrics),
    )


def _everything(overrides: Overrides, demo_model: Path) -> Needs:
    model = overrides.model or demo_model
    return Needs(
        engine=EngineNeed(model, overrides.device or "cpu", 0.9, "auto", "auto", "auto", 0, 0, 16),
        tokenizer=model,
        redis=_redis(overrides),
        embedded_redis=overrides.redis_url is None,
        transfers=True,
    )


def _redis(overrides: Overrides) -> RedisNeed | None:
    """A worker and a router do not talk to Redis: it is looked at where it is named."""
    timeout_s = KVStoreSettings.model_fields["redis_timeout_s"].default
    return RedisNeed(overrides.redis_url, False, timeout_s) if overrides.redis_url is not None else None


def _given(**binds: str) -> dict[str, str]:
    return {setting: bind for setting, bind in binds.items() if bind}
