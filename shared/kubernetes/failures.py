"""What goes wrong between us and the API server, as our errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from kubernetes.aio.config import ConfigException

from shared.errors import ClusterForbids, ClusterUnavailable


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


def refusal(status: int, content: bytes, call: str = "") -> ClusterUnavailable:
    """The error for an answer that is no success: ClusterForbids for 401 and 403, else ClusterUnavailable.

    `content` is a Status object, bare or in a watch's event; `call`, such as "GET /api", is named in the latter's text.
    """
    said = status_message(content)
    if status in (401, 403):
        return ClusterForbids(f"the Kubernetes API server forbids it: {said}", status=status)
    to = f" to {call}" if call else ""
    return ClusterUnavailable(f"the Kubernetes API server answers {status}{to}: {said}", status=status)


def status_message(content: bytes) -> str:
    """The text of a Status object, bare or in a watch's event; the beginning of whatever else it is."""
    try:
        answer = json.loads(content)
        return str(answer.get("object", answer)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return content[:200].decode(errors="replace")
