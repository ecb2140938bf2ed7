"""The `tandem` command: start a cluster on this machine, talk to one anywhere."""

import sys

EXIT_INTERRUPTED = 130
"""128 + SIGINT, the shells' convention."""


def run() -> None:
    """Entry point of the command: Ctrl-C ends it without a traceback also while its parts are imported."""
    try:
        from tandem_cli.main import main
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    main()
