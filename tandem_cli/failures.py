"""How the command fails: one clear line on stderr and an exit status, never a traceback for a known error."""

from __future__ import annotations

import sys
from collections.abc import Container

from shared.errors import ConfigError, InvalidRequest, ModelLoadError, NotFound, TandemError, Unauthenticated

EXIT_FAILED = 1
EXIT_INVALID = 2
"""The caller has to change something: usage, a setting, a request's field, a model folder, the API key."""


def exit_status(error: TandemError) -> int:
    """2 where the caller has to change something, else 1."""
    if isinstance(error, InvalidRequest | ConfigError | NotFound | ModelLoadError | Unauthenticated):
        return EXIT_INVALID
    return EXIT_FAILED


def report(error: TandemError, flags: Container[str] = ()) -> None:
    """Prints the error, with the flag of `flags` that it is about; for a process that died also its log's path and last
    lines."""
    print(f"tandem: {_in_flags(error, flags)}", file=sys.stderr)
    if log := error.details.get("log"):
        print(f"  {error.details.get('process')} logs to {log}", file=sys.stderr)
    if tail := error.details.get("log_tail"):
        print("\n".join(f"  | {line}" for line in str(tail).splitlines()), file=sys.stderr)


def _in_flags(error: TandemError, flags: Container[str]) -> str:
    """The message in the command's own terms: routers speak of headers and fields."""
    if isinstance(error, Unauthenticated):
        return f"{error.message.partition(': send')[0]}: give it with --api-key, or in TANDEM_API_KEY"
    flag = f"--{(error.field or '').replace('_', '-')}"
    return f"{error.message} ({flag})" if flag in flags and flag not in error.message else error.message
