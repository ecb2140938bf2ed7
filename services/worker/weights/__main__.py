"""python -m services.worker.weights WORKER'S SETTINGS: fetches the model folder from a peer, and loads nothing.

For what runs before a worker, such as an init container. Exit status 0: the folder is whole; 2: it is not.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.worker.settings import WorkerSettings
from services.worker.weights.fetch import fetch_missing_folder
from services.worker.weights.files import is_whole
from shared.config import load_settings
from shared.errors import ModelLoadError, TandemError
from shared.process import EXIT_REFUSED, error_event, progress_event
from shared.telemetry.logs import set_up_logs


def main() -> int:
    """Returns the exit status."""
    try:
        settings = load_settings(WorkerSettings)
        set_up_logs("tandem-worker", settings.log_format, settings.log_level)
        asyncio.run(fetch_missing_folder(settings, progress_event))
        if not is_whole(folder := Path(settings.model)):
            raise ModelLoadError(f"{folder} has no model, and weights_from names nobody", field="weights_from")
    except TandemError as error:
        error_event(error)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
