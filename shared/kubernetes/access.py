"""How a process reaches the API server: as its Pod's service account, or by a kubeconfig file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.incluster_config import SERVICE_TOKEN_FILENAME

from shared.errors import ClusterForbids, ClusterUnavailable, ConfigError

NAMESPACE_FILE = Path(SERVICE_TOKEN_FILENAME).with_name("namespace")


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turns the errors of the client's library into ClusterUnavailable."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise ClusterUnavailable(f"the Kubernetes API server does not answer: {reason}") from error
    except ConfigException as error:
        raise ClusterUnavailable(f"the credentials for the Kubernetes API server: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterUnavailable(f"the Kubernetes API server's answer cannot be read: {error!r}") from error


def refusal(status: int, content: bytes, call: str = "") -> ClusterUnavailable:
    """The error for an answer that is no success: ClusterForbids for 401 and 403, else ClusterUnavailable.

    `content` is a Status object, bare or in a watch's event; `call`, such as "GET /api", is named in the latter's text.
    """
    reason = status_message(content)
    if status in (401, 403):
        return ClusterForbids(f"the Kubernetes API server forbids it: {reason}", status=status)
    to = f" to {call}" if call else ""
    return ClusterUnavailable(f"the Kubernetes API server answers {status}{to}: {reason}", status=status)


def status_message(content: bytes) -> str:
    """The text of a Status object, bare or in a watch's event; the beginning of whatever else it is."""
    try:
        answer = json.loads(content)
        return str(answer.get("object", answer)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return content[:200].decode(errors="replace")


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
