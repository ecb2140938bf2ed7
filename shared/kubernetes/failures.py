"""The client library's exceptions as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from kubernetes.aio.config import ConfigException

from shared.errors import ClusterUnavailable


@contextmanager
def typed_errors() -> Iterator[None]:
    """What the client's library raises becomes ClusterUnavailable."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise ClusterUnavailable(f"the Kubernetes API server does not answer: {reason}") from error
    except ConfigException as error:
        raise ClusterUnavailable(f"the credentials for the Kubernetes API server: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterUnavailable(f"the Kubernetes API server's answer cannot be read: {error!r}") from error
