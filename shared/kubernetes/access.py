"""How a process reaches the API server: as its Pod's service account, or by a kubeconfig file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config.incluster_config import SERVICE_TOKEN_FILENAME

from shared.errors import ConfigError
from shared.kubernetes.failures import typed_errors

NAMESPACE_FILE = Path(SERVICE_TOKEN_FILENAME).with_name("namespace")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """One API server, one user, one namespace."""

    namespace: str
    kubeconfig: Path | None = None
    """None: the service account of the Pod that this process runs in. Its token is read again every minute."""

    @classmethod
    def of(cls, namespace: str, kubeconfig: Path | None, field: str) -> ClusterAccess:
        """An empty namespace stands for the Pod's own, or for the one of the kubeconfig's context.

        Raises ConfigError naming `field` where this is no Pod with a service account and no kubeconfig is given, and
        where the kubeconfig cannot be read.
        """
        if kubeconfig is None:
            try:
                client_config = client.Configuration()
                config.load_incluster_config(client_config)
                return cls(namespace or NAMESPACE_FILE.read_text().strip(), None)
            except (config.ConfigException, OSError) as error:
                raise ConfigError(
                    f"{field}: this is no Pod with a service account's token ({error}), and no kubeconfig is given",
                    field=field,
                ) from error
        try:
            _, context = config.list_kube_config_contexts(str(kubeconfig))
            return cls(namespace or context["context"].get("namespace", "default"), kubeconfig)
        except (config.ConfigException, OSError, yaml.YAMLError, TypeError, KeyError) as error:
            raise ConfigError(f"{field}: kubeconfig {kubeconfig}: {error}", field=field) from error

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[client.ApiClient]:
        """A client, which connects on its first call. Raises ClusterUnavailable where the token or the kubeconfig
        cannot be read any more."""
        settings = client.Configuration()
        with typed_errors():
            if self.kubeconfig is None:
                config.load_incluster_config(settings)
            else:
                await config.load_kube_config(str(self.kubeconfig), client_configuration=settings)
            api = client.ApiClient(settings)
        async with api:
            yield api
