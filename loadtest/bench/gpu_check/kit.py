"""What `make gpu-kit` packed, on the machine it was packed for: `python -m loadtest.bench.gpu_check.kit`.

Packages that the machine has in the kit's version or a newer one are left alone, so that nothing takes the place of
what its torch was built with.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option
from loadtest.rig.command_line import run as run_command
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
KIT = ROOT / "out" / "gpu-kit.tar.xz"
STUBS = "stubs"


def unpack(kit: Path, site: Path, root: Path = ROOT) -> list[str]:
    """Puts the packages that are absent here, or older, into `site`, and the stubs into the checkout at `root`, if they
    are absent there. Returns the packages. Raises ConfigError for a damaged kit."""
    taken: list[str] = []
    chosen: dict[str, bool] = {STUBS: not (root / "shared" / "rpc" / "pb").exists()}
    try:
        with tarfile.open(kit, "r:xz") as archive:
            for entry in archive:
                package, _, path = entry.name.partition("/")
                if package not in chosen:
                    name, _, version = package.partition("==")
                    chosen[package] = is_older(name, version)
                    taken += [package] if chosen[package] else []
                if chosen[package]:
                    entry.name = path
                    entry.linkname = entry.linkname.partition("/")[2]
                    archive.extract(entry, root if package == STUBS else site, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{kit} cannot be unpacked: {error}; make gpu-kit builds it anew") from error
    return taken


def is_older(name: str, version: str) -> bool:
    """Whether the package is absent here or of an earlier version."""
    try:
        return _parts(metadata.version(name)) < _parts(version)
    except metadata.PackageNotFoundError:
        return True


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a version's release: those of `2.3.1.post1` and `2.3.1` are alike."""
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


def use(kit: Path = KIT, root: Path = ROOT) -> Path | None:
    """Makes the kit's packages those of this process and its children; None where there is no kit. Unpacks it once."""
    if not kit.exists():
        return None
    digest = f"{kit.stat().st_size} {kit.stat().st_mtime_ns}"
    site, done = kit.with_name("gpu-kit") / "site", kit.with_name("gpu-kit") / "done"
    if not done.exists() or done.read_text() != digest:
        shutil.rmtree(site, ignore_errors=True)  # of an earlier kit, or half of this one
        site.mkdir(parents=True)
        packages = unpack(kit, site, root)
        print(f"unpacked {kit}: {', '.join(packages)}", flush=True)
        done.write_text(digest)
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    return site


def main(kit: Annotated[Path, Option("the archive")] = KIT) -> int | None:
    """Unpacks the kit and prints the folder to put on PYTHONPATH."""
    site = use(kit)
    if site is None:
        raise ConfigError(f"there is no {kit}: make gpu-kit builds it")
    print(site)
    return None


if __name__ == "__main__":
    run_command(main, name="python -m loadtest.bench.gpu_check.kit")
