"""HEALTHCHECK of the image: exit status 0 when the service in this container answers its probe.

Workers and the store answer beside their metrics, a router on its HTTP port. TANDEM_HEALTH_URLS names other addresses,
separated by spaces; one that answers is enough.
"""

from __future__ import annotations

import os
import sys
import urllib.request

DEFAULT = "http://127.0.0.1:9090/healthz http://127.0.0.1:8000/healthz"
TIMEOUT_S = 2.0


def answers(url: str) -> bool:
    """Whether it gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(not any(answers(url) for url in os.environ.get("TANDEM_HEALTH_URLS", DEFAULT).split()))
