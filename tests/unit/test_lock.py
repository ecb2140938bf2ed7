"""The lock's script: what it leaves out of the resolver's answer, and when it finds that the lock is out of date."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.unit.scripts import ROOT, load_script

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
[project]
requires-python = ">=3.11,<3.15"
dependencies = ["torch==2.13.0", "numpy>=2"]
[project.optional-dependencies]
dev = ["triton==3.9.0; platform_system == 'Linux'"]
"""
PINS = "numpy==2.4.6\nsetuptools==84.2.1\ntorch==2.13.0\ntriton==3.9.0\n"


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    return load_script("lock")


def found(lock: ModuleType, pins: str, project: str = PROJECT) -> list[str]:
    header = lock.Declared.read(PROJECT).header
    return lock.problems(lock.Declared.read(project), header + pins)


def test_the_projects_own_lock_satisfies_it(lock: ModuleType) -> None:
    declared = lock.Declared.read((ROOT / "pyproject.toml").read_text())
    assert declared.pythons == ("3.11", "3.12", "3.13", "3.14")
    assert lock.problems(declared, (ROOT / "requirements.lock").read_text()) == []


def test_a_lock_with_every_requirement_has_no_problem(lock: ModuleType) -> None:
    assert found(lock, PINS) == []


@pytest.mark.parametrize(
    ("pins", "problem"),
    [
        (PINS.replace("2.4.6", "1.26.4"), "asks for numpy>=2, requirements.lock has 1.26.4"),
        (PINS.replace("numpy==2.4.6\n", ""), "asks for numpy>=2, requirements.lock has nothing"),
        (PINS.replace("84.2.1", "70.0"), "asks for setuptools>=77, requirements.lock has 70.0"),
        (PINS.replace("3.9.0", "3.7.1"), "requirements.lock has 3.7.1"),
        (PINS.replace("2.4.6", "2.4.6 ; python_full_version < '3.14'"), "numpy>=2, requirements.lock has nothing"),
        (PINS.replace("2.4.6", "2.4.6 ; platform_machine == 'x86_64'"), "numpy>=2, requirements.lock has nothing"),
    ],
)
def test_a_requirement_that_some_machine_lacks_is_named(lock: ModuleType, pins: str, problem: str) -> None:
    (only,) = found(lock, pins)
    assert problem in only


def test_a_pin_a_python_is_enough(lock: ModuleType) -> None:
    forked = "numpy==2.4.6 ; python_full_version < '3.12'\nnumpy==2.5.5 ; python_full_version >= '3.12'\n"
    assert found(lock, PINS.replace("numpy==2.4.6\n", forked)) == []


def test_another_python_needs_another_lock(lock: ModuleType) -> None:
    assert found(lock, PINS, PROJECT.replace("3.15", "3.16"))


def test_cuda_libraries_of_torch_alone_are_left_out(lock: ModuleType) -> None:
    answer = [
        "cuda-bindings==13.5.0 ; sys_platform == 'linux'  # via rmm-cu13, torch",
        "cuda-pathfinder==1.9.0 ; sys_platform == 'linux'  # via cuda-bindings",
        "cuda-toolkit==13.0.3.0 ; sys_platform == 'linux'  # via torch",
        "jinja2==3.1.6 ; sys_platform == 'linux'  # via torch",
        "librt==0.16.0 ; platform_python_implementation != 'PyPy' and sys_platform == 'linux'  # via mypy",
        "nvidia-cublas==13.1.1.3 ; sys_platform == 'linux'  # via cuda-toolkit, nvidia-cudnn-cu13",
        "nvidia-cudnn-cu13==9.20.0.48 ; sys_platform == 'linux'  # via torch",
        "nvidia-ml-py==13.615.71 ; sys_platform == 'linux'  # via ucxx-cu13",
        "rmm-cu13==26.10.0 ; sys_platform == 'linux'  # via ucxx-cu13",
        "torch==2.13.0 ; sys_platform == 'linux'",
    ]
    assert lock.without_cuda_libraries(answer) == [
        "cuda-bindings==13.5.0",
        "cuda-pathfinder==1.9.0",
        "jinja2==3.1.6",
        "librt==0.16.0 ; platform_python_implementation != 'PyPy'",
        "nvidia-ml-py==13.615.71",
        "rmm-cu13==26.10.0",
        "torch==2.13.0",
    ]


def test_a_local_version_is_refused(lock: ModuleType) -> None:
    with pytest.raises(lock.CannotLock, match=r"torch 2\.13\.0\+cpu is one machine's build"):
        lock.without_cuda_libraries(["torch==2.13.0+cpu"])
