"""How the command fails: one clear line on stderr and an exit status, never a traceback for a known error."""

from __future__ import annotations

import sys

from shared.errors import ConfigError, InvalidRequest, ModelLoadError, NotFound, TandemError

EXIT_FAILED = 1
EXIT_INVALID = 2
"""What was asked for cannot be had: usage, a setting, a request's field, a model folder."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, the convention of shells."""


def exit_status(error: TandemError) -> int:
    """2 where the caller has to change something, else 1."""
    if isinstance(error, InvalidRequest | ConfigError | NotFound | ModelLoadError):
        return EXIT_INVALID
    return EXIT_FAILED


def report(error: TandemError) -> None:
    """Writes the error, and for a process that died where its log is and how it ends."""
    print(f"tandem: {error.message}", file=sys.stderr)
    if log := error.details.get("log"):
        print(f"  {error.details.get('process')} logs to {log}", file=sys.stderr)
    if tail := error.details.get("log_tail"):
        print("\n".join(f"  | {line}" for line in str(tail).splitlines()), file=sys.stderr)
