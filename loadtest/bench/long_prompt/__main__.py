"""`python -m loadtest.bench.long_prompt`"""

from __future__ import annotations

import sys

from loadtest.bench.long_prompt.cli import main
from shared.errors import TandemError

if __name__ == "__main__":
    try:
        main()
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(2)
