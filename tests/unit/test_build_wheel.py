"""The wheel holds what a machine without a compiler needs, and its tag promises no more than its libraries ask for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from shared.errors import ConfigError
from shared.kernels.cpu import build
from shared.kernels.cpu.from_wheel import PLACE, take_libraries
from shared.kernels.cpu.isa import BUILT, named, processor_features
from tests.unit.kernels.isas import every_isa, needs_library
from tests.unit.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("build_wheel")


@needs_library
@every_isa
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils here")
def test_a_library_asks_for_nothing_that_a_machine_with_torch_may_lack(script, isa):
    instructions = named(isa, processor_features())
    assert instructions is not None
    libraries, versions = script.needs(build.library(instructions))
    assert libraries <= script.SYSTEM
    assert script.tag(libraries, versions) == script.LEVELS[0].tag


def wheel_of(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as content:
        for name in names:
            content.writestr(PLACE + name, b"a library: " + name.encode())
    return path


def test_a_checkout_takes_a_wheels_libraries_of_its_own_sources(tmp_path):
    mine = build.prebuilt_names()[-1]
    wheel = wheel_of(tmp_path / "w.whl", mine, "kernels-avx2-0123.so")
    assert [path.name for path in take_libraries(wheel, tmp_path / "taken")] == [mine]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [mine]
    assert (tmp_path / "taken" / mine).read_bytes() == b"a library: " + mine.encode()


def test_a_wheel_of_other_sources_gives_nothing(tmp_path):
    assert take_libraries(wheel_of(tmp_path / "w.whl", "kernels-avx2-0123.so"), tmp_path / "taken") == []
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize("content", [b"no zip", None])
def test_what_is_no_wheel_is_refused_by_name(tmp_path, content):
    path = tmp_path / "w.whl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"WHEEL .*w\.whl cannot be read as a wheel") as caught:
        take_libraries(path, tmp_path)
    assert caught.value.field == "WHEEL"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once for each state of the sources, as those that workers use. In the place of one that this processor
    cannot run lies AVX2's: `make wheel` compiles all of them, which takes minutes."""
    folder, features = tmp_path_factory.mktemp("libraries"), processor_features()
    for name, instructions in zip(build.prebuilt_names(), build.prebuilt_sets(), strict=True):
        shutil.copy2(build.made(BUILT[-1] if instructions.missing(features) else instructions), folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
@pytest.mark.skipif(bool(BUILT[-1].missing(processor_features())), reason="the processor runs none of the libraries")
def test_an_unpacked_wheel_computes_without_a_compiler(tmp_path, libraries):
    """Made for real, for every instruction set; then used from elsewhere, with an empty PATH and home."""
    command = [sys.executable, ROOT / ".ci/build_wheel.py", "--out", tmp_path / "out", "--libraries", libraries]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    wheel = Path(made.stdout.strip())
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    site, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    assert {path.name for path in (site / PLACE).iterdir()} == set(build.prebuilt_names())
    assert (site / "models/demo/model.safetensors").stat().st_size == (
        ROOT / "models/demo/model.safetensors"
    ).stat().st_size
    program = (
        "import torch, tandem_cli.main, services.local.spec as spec\n"
        "from shared.rpc.pb.tandem.v1 import inference_pb2\n"
        "from shared.kernels.cpu.build import choose\n"
        "from shared.kernels.backends.registry import choose_kernels\n"
        "x = torch.arange(64.0).reshape(2, 32)\n"
        "assert torch.allclose(choose_kernels('cpu', torch.float32, 'cpu').act_and_mul(x),"
        " torch.nn.functional.silu(x[:, :16]) * x[:, 16:])\n"
        "print(choose()[1], spec.DEMO_MODEL, sep='\\n')\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "HOME": str(home), "PYTHONPATH": str(site)}
    environment.pop("TANDEM_CPU_ISA", None)
    used = subprocess.run([sys.executable, "-c", program], cwd=home, env=environment, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr
    library, demo = map(Path, used.stdout.split())
    assert library.parent == site / PLACE
    assert demo == site / "models/demo"
