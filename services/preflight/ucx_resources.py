"""`python -m services.preflight.ucx_resources`: what UCX offers on this machine, as JSON on stdout.

In a process of its own: a library that does not fit the machine may end the process that loads it.
"""

from __future__ import annotations

import json
import os
import re

from shared.errors import TransferFailed

_RESOURCE = re.compile(r"-- (\S+)/(\S+)\s*$", re.MULTILINE)


def resources() -> dict[str, list[str]]:
    """Devices by transport, such as {"tcp": ["eth0", "lo"], "cma": ["memory"]}. Raises TransferFailed."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        from ucxx._lib import libucxx

        info: str = libucxx.UCXContext({}).info
    except Exception as error:
        raise TransferFailed(f"UCX cannot be opened: {type(error).__name__}: {error}") from error
    return parse(info)


def parse(info: str) -> dict[str, list[str]]:
    """`resources` of the text in which UCX describes a context."""
    found: dict[str, list[str]] = {}
    for transport, device in _RESOURCE.findall(info):
        found.setdefault(transport, []).append(device)
    return found


def version() -> str:
    """Version of the UCX that is loaded. Raises ImportError."""
    from ucxx._lib.libucxx import get_ucx_version

    return ".".join(str(part) for part in get_ucx_version())


if __name__ == "__main__":
    print(json.dumps({"version": version(), "resources": resources()}))
