"""python -m services.worker.weights WORKER'S SETTINGS [-- COMMAND…]: fetches the model folder from a peer, and loads
nothing.

For what runs before a worker, such as an init container. The command runs in place of this process where no peer has
brought the folder: what fetches it elsewhere. Exit status without one: 0: the folder is whole; 2: it is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.worker.settings import WorkerSettings
from services.worker.weights.fetch import fetch_missing_folder
from services.worker.weights.files import is_whole
from shared.config import load_settings
from shared.errors import ConfigError, ModelLoadError, TandemError
from shared.process import EXIT_REFUSED, error_event, progress_event
from shared.telemetry.logs import set_up_logs

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, unless the command takes over."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    command = given[at + 1 :]
    try:
        settings = load_settings(WorkerSettings, given[:at])
        set_up_logs("tandem-worker", settings.log_format, settings.log_level)
        try:
            _fetch(settings)
        except ModelLoadError as error:
            if not command:
                raise
            logger.warning("%s; %s fetches it", error.message, command[0])
            _become(command)
    except TandemError as error:
        error_event(error)
        return EXIT_REFUSED
    return 0


def _fetch(settings: WorkerSettings) -> None:
    """Raises ModelLoadError where the folder is not whole then."""
    asyncio.run(fetch_missing_folder(settings, progress_event))
    if not is_whole(folder := Path(settings.model)):
        raise ModelLoadError(f"{folder} has no model, and weights_from names nobody", field="weights_from")


def _become(command: Sequence[str]) -> None:
    """Raises ConfigError where it cannot run."""
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot run: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
