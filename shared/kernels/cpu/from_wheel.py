"""Takes the libraries that a wheel holds: `python -m shared.kernels.cpu.from_wheel WHEEL`, or `make setup WHEEL=path`.

A checkout then needs no compiler. A library is used only where it was made from the checkout's own sources and flags;
its name says from which.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path, PurePosixPath

from shared.errors import ConfigError, TandemError
from shared.kernels.cpu.build import PREBUILT, prebuilt_names

PLACE = "shared/kernels/cpu/prebuilt/"
"""Folder of the libraries in a wheel."""


def take_libraries(wheel: Path, folder: Path = PREBUILT) -> list[Path]:
    """Copies those libraries of the wheel that this checkout's sources make into `folder`, and returns them.

    The list is empty where the wheel was made from other sources. Raises ConfigError where it is no wheel.
    """
    taken: list[Path] = []
    try:
        with zipfile.ZipFile(wheel) as content:
            for name in prebuilt_names():
                if str(PurePosixPath(PLACE, name)) not in content.namelist():
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / f"{name}.partial"
                partial.write_bytes(content.read(PLACE + name))
                taken.append(partial.replace(folder / name))
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"WHEEL {wheel} cannot be read as a wheel: {error}", field="WHEEL", value=str(wheel)
        ) from error
    return taken


def main() -> None:
    """Exit status 2 where WHEEL is no wheel; one of other sources is only named, since a compiler may serve."""
    wheel = Path(sys.argv[1])
    try:
        taken = take_libraries(wheel)
    except TandemError as error:
        print(error.message, file=sys.stderr)
        sys.exit(2)
    if not taken:
        print(f"{wheel.name} was made from other sources of the kernels: its libraries are not used")
    for path in taken:
        print(path)


if __name__ == "__main__":
    main()
