"""Settings by which a process reaches the API server."""

from __future__ import annotations

from pathlib import Path

from shared.settings.group import SettingGroup


class ApiServerSettings(SettingGroup):
    """Settings of a service that reads or changes objects of a Kubernetes cluster."""

    namespace: str = ""
    """Namespace of these; empty = the Pod's own."""
    kubeconfig: Path | None = None
    """File with the API server's address and a user, for a process outside the cluster; unset = the service account of
    its Pod."""
