"""How the command fails: one clear line on stderr and an exit status, never a traceback for a known error."""

from __future__ import annotations

import sys

from shared.errors import ConfigError, InvalidRequest, ModelLoadError, NotFound, TandemError

EXIT_FAILED = 1
EXIT_INVALID = 2
"""The caller has to change something: usage, a setting, a request's field, a model folder."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, the shells' convention."""


def exit_status(error: TandemError) -> int:
    """2 where the caller has to change something, else 1."""
    if isinstance(error, InvalidRequest | ConfigError | NotFound | ModelLoadError):
        return EXIT_INVALID
    return EXIT_FAILED


def report(error: TandemError) -> None:
    """Prints the error; for a process that died also its log's path and last lines."""
    print(f"tandem: {error.message}", file=sys.stderr)
    if log := error.details.get("log"):
        print(f"  {error.details.get('process')} logs to {log}", file=sys.stderr)
    if tail := error.details.get("log_tail"):
        print("\n".join(f"  | {line}" for line in str(tail).splitlines()), file=sys.stderr)
