"""The kit of a GPU machine: what it leaves out, and that it takes the place of nothing that is there."""

from __future__ import annotations

import importlib.metadata
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from loadtest.bench.gpu_check import kit
from shared.errors import ConfigError
from tests.unit.scripts import load_script

LIBRARY = b"\x7fELF" * 1000


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gpu_kit")


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as content:
        for place, data in {**files, f"{name}-{version}.dist-info/METADATA": f"Name: {name}\n".encode()}.items():
            content.writestr(place, data)
    return path


def packed(script: ModuleType, path: Path, *wheels: Path) -> Path:
    with tarfile.open(path, "w:xz") as archive:
        for item in wheels:
            script.add_wheel(archive, item)
        stub = tarfile.TarInfo("stubs/shared/rpc/pb/x_pb2.py")
        stub.size = 3
        archive.addfile(stub, io.BytesIO(b"A=1"))
    return path


def test_absent_and_older_packages_are_unpacked_without_what_is_needless(script: ModuleType, tmp_path: Path) -> None:
    files = {
        "no_such_kit/__init__.py": b"x = 1\n",
        "no_such_kit/lib/libx.so": LIBRARY,
        "no_such_kit/lib/libx.so.0": LIBRARY,
        "no_such_kit/lib/libx.a": LIBRARY,
        "no_such_kit/include/x.h": b"int x;",
        "no_such_kit/tests/test_x.py": b"",
        "no_such_kit-2.0.data/purelib/kit_module.py": b"y = 2\n",
        "no_such_kit-2.0.data/scripts/x": b"#!",
    }
    numpy = importlib.metadata.version("numpy")
    archive = packed(
        script,
        tmp_path / "kit.tar.xz",
        wheel(tmp_path, "no_such_kit", "2.0", files),
        wheel(tmp_path, "numpy", numpy, {"numpy/__init__.py": b""}),
        wheel(tmp_path, "pytest", "999.1", {"pytest/__init__.py": b""}),
    )
    site, root = tmp_path / "site", tmp_path / "root"
    assert kit.unpack(archive, site, root) == ["no-such-kit==2.0", "pytest==999.1"]
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert found == {
        "no_such_kit/__init__.py", "no_such_kit/lib/libx.so", "no_such_kit/lib/libx.so.0", "kit_module.py",
        "no_such_kit-2.0.dist-info/METADATA", "pytest/__init__.py", "pytest-999.1.dist-info/METADATA",
    }  # fmt: skip
    assert (site / "no_such_kit/lib/libx.so.0").read_bytes() == LIBRARY
    assert (root / "shared/rpc/pb/x_pb2.py").read_text() == "A=1"
    # A file under two names is in the archive once.
    assert archive.stat().st_size < len(LIBRARY)


def test_the_sources_have_their_version_where_they_are_not_installed(script: ModuleType, tmp_path: Path) -> None:
    version = importlib.metadata.version("tandem-llm")
    with tarfile.open(tmp_path / "kit.tar.xz", "w:xz") as archive:
        script.add_own_version(archive)
    with tarfile.open(tmp_path / "kit.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / f"tandem-llm=={version}")])
    assert (found.name, found.version) == ("tandem-llm", version)


def test_stubs_that_are_there_stay(script: ModuleType, tmp_path: Path) -> None:
    archive = packed(script, tmp_path / "kit.tar.xz")
    (tmp_path / "root/shared/rpc/pb").mkdir(parents=True)
    assert kit.unpack(archive, tmp_path / "site", tmp_path / "root") == []
    assert list((tmp_path / "root/shared/rpc/pb").iterdir()) == []


def test_a_kit_is_unpacked_once_and_a_new_one_takes_its_place(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    archive = tmp_path / "kit.tar.xz"
    assert kit.use(archive, tmp_path) is None
    for version, name in (("1.0", "first"), ("1.0.1", "second")):
        packed(script, archive, wheel(tmp_path, "no_such_kit", version, {f"{name}_module.py": b""}))
        for is_first in (True, False):
            site = kit.use(archive, tmp_path)
            assert site is not None
            assert [path.name for path in site.glob("*_module.py")] == [f"{name}_module.py"]
            assert (f"no-such-kit=={version}" in capsys.readouterr().out) is is_first
    assert os.environ["PYTHONPATH"] == os.pathsep.join((str(site), "/elsewhere"))
    assert sys.path[0] == str(site)


def test_a_damaged_kit_is_named(tmp_path: Path) -> None:
    (tmp_path / "kit.tar.xz").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match=r"kit\.tar\.xz cannot be unpacked.*make gpu-kit"):
        kit.unpack(tmp_path / "kit.tar.xz", tmp_path / "site", tmp_path)


def test_it_has_all_that_is_needed_but_torch_and_what_torch_brings(script: ModuleType) -> None:
    assert {"torch", "triton"} <= script.LEFT_OUT
    asked = ["torch", "pydantic>=2", "numpy ; python_version < '3'"]
    found = script.requirements(asked, {})
    assert {"pydantic", "pydantic-core", "annotated-types"} <= set(found)
    assert not {"torch", "triton", "sympy", "networkx", "numpy"} & set(found)
    assert found["pydantic"] == importlib.metadata.version("pydantic")
