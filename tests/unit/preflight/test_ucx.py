"""Transports that UCX offers, and what they are worth."""

from __future__ import annotations

import pytest

from services.preflight.finding import Level
from services.preflight.ucx import Ucx, judge
from services.preflight.ucx_resources import parse

INFO = """
#     component 0  :  self
#            md 1  :  component 1  tcp
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 5  :  md 4  dev 0  flags -- cma/memory
#      resource 7  :  md 5  dev 3  flags -- rc_mlx5/mlx5_0:1
"""


def test_devices_are_listed_by_transport() -> None:
    found = parse(INFO)
    assert found == {"self": ["memory"], "tcp": ["eth0", "lo"], "cma": ["memory"], "rc_mlx5": ["mlx5_0:1"]}
    assert Ucx("1.21.0", found).rdma == ["rc_mlx5"]


def test_a_ucx_that_is_too_old_is_refused() -> None:
    finding = judge(Ucx("1.18.1", {"tcp": ["eth0"], "rc_mlx5": ["a"]}), has_rdma_device=True, rdma_required=True)
    assert finding.level is Level.FAIL
    assert "1.19" in finding.fix


@pytest.mark.parametrize(
    ("transports", "device", "required", "level", "says"),
    [
        ("tcp cma", False, False, Level.OK, "tcp"),
        ("tcp cma", True, False, Level.WARN, "no RDMA transport"),
        ("tcp cma", True, True, Level.FAIL, "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"),
        ("tcp cma", False, True, Level.FAIL, "no RDMA transport"),
        ("tcp cma rc_mlx5", True, True, Level.OK, "rc_mlx5"),
        ("srd cma", True, True, Level.OK, "srd"),
        ("cma", False, False, Level.FAIL, "UCX_TLS"),
        ("tcp posix", False, False, Level.WARN, "no CMA"),
    ],
)
def test_transports_are_judged(transports: str, device: bool, required: bool, level: Level, says: str) -> None:
    ucx = Ucx("1.21.0", {name: ["eth0"] for name in transports.split()})
    finding = judge(ucx, has_rdma_device=device, rdma_required=required)
    assert finding.level is level
    assert says in f"{finding.text} {finding.fix}"
