"""The discovery that the router's settings ask for."""

from __future__ import annotations

from services.router.settings import RouterSettings, parse_labels
from services.router.workers.discovery import Discovery, StaticDiscovery
from services.router.workers.file_discovery import FileDiscovery
from shared.address import parse_named
from shared.errors import ConfigError


def discovery_of(settings: RouterSettings) -> Discovery:
    """Pods where `discovery` says so, a watched file where `workers_file` is set, else the workers of `prefill` and
    `decode`.

    Raises ConfigError naming the setting: for two of them, for none, and for pools that do not fit the mode.
    """
    collocated = settings.mode == "collocated"
    if settings.discovery == "kubernetes":
        return _kubernetes(settings, collocated)
    for field in ("selector", "namespace", "kubeconfig"):
        if getattr(settings.kubernetes, field):
            raise ConfigError(
                f"kubernetes.{field} is set, and discovery is list: set discovery to kubernetes",
                field=f"kubernetes.{field}",
            )
    if settings.workers_file is not None:
        for field in ("prefill", "decode", "labels"):
            if getattr(settings, field):
                raise ConfigError(
                    f"{field} and workers_file are both set: the file names all workers and their labels", field=field
                )
        return FileDiscovery(settings.workers_file, collocated=collocated)
    prefills = parse_named(settings.prefill, "prefill")
    decodes = parse_named(settings.decode, "decode")
    if not decodes:
        raise ConfigError("decode must name at least one worker, unless workers_file is set", field="decode")
    if not collocated and not prefills:
        raise ConfigError("prefill must name at least one worker, or mode be collocated", field="prefill")
    if collocated and prefills:
        raise ConfigError("prefill must be empty in collocated mode: the decode workers prefill", field="prefill")
    both = [name for name, address in prefills.items() if decodes.get(name, address) != address]
    if both:
        raise ConfigError(f"worker {min(both)!r} is named in both pools with two addresses", field="prefill")
    return StaticDiscovery.of(prefills, decodes, parse_labels(settings.labels, prefills.keys() | decodes.keys()))


def _kubernetes(settings: RouterSettings, collocated: bool) -> Discovery:
    for field in ("prefill", "decode", "labels", "workers_file"):
        if getattr(settings, field):
            raise ConfigError(
                f"{field} is set, and discovery is kubernetes: Pods name all workers and their labels", field=field
            )
    if not settings.kubernetes.selector:
        raise ConfigError("kubernetes.selector must say which Pods are workers", field="kubernetes.selector")
    # Imported here: the client takes a second and 50 MB.
    from services.router.workers.kubernetes_discovery import KubernetesDiscovery
    from shared.kubernetes.access import ClusterAccess

    access = ClusterAccess.of(
        settings.kubernetes.namespace, settings.kubernetes.kubeconfig, field="kubernetes.kubeconfig"
    )
    return KubernetesDiscovery(access, settings.kubernetes.selector, collocated=collocated)
