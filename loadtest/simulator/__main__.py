"""`python -m loadtest.simulator --trace FILE …`"""

from __future__ import annotations

import sys

from loadtest.simulator.cli import main
from shared.errors import ConfigError

if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"{error.field}: {error}" if error.field else str(error))
