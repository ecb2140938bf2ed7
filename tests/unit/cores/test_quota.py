"""A container's CPU quota is found in cgroups of both versions, wherever in the hierarchy it is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.cores.quota import read_quota


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "250000 100000")
    assert read_quota(tmp_path) == 2.5


def test_the_least_of_a_pod_and_its_container_holds(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/kubepods/pod1/c1")
    write(tmp_path, "sys/fs/cgroup/kubepods/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/cpu.max", "150000 50000")
    write(tmp_path, "sys/fs/cgroup/kubepods/pod1/c1/cpu.max", "800000 100000")
    assert read_quota(tmp_path) == 3.0


@pytest.mark.parametrize("path", ["/", "/docker/abc", "/process/1"])
def test_version_1_has_files_of_its_own(tmp_path: Path, path: str) -> None:
    write(tmp_path, "proc/self/cgroup", f"12:cpuset:/\n4:cpu,cpuacct:{path}\n0::/")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "400000")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    write(tmp_path, "sys/fs/cgroup/cpuset/cpu.cfs_quota_us", "1")
    assert read_quota(tmp_path) == 4.0


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert read_quota(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "2:cpu:/\n0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert read_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/cpu.max", "nonsense")
    assert read_quota(tmp_path) is None
