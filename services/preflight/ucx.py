"""UCX: can it be opened, and by which transports would blocks travel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.preflight.finding import Finding, fail, ok, warn

CHECK = "ucx"
TIMEOUT_S = 60.0
RDMA = ("rc", "dc", "ud", "srd", "gga")
"""UCX's transports over RDMA devices begin with these: rc_mlx5, dc_mlx5, rc_verbs, ud_verbs, srd, …"""
_REINSTALL = "use an image of this release; outside of images: make setup"
_OTHER_TLS = "leave UCX_TLS unset, or add tcp and sm to it"
_WITH_CMA = f"{_OTHER_TLS}; let processes of one user read each other's memory (kernel.yama.ptrace_scope of 0 or 1)"
LEAST_VERSION = (1, 19)
"""UCX version that UCXX is built for."""
_NEWER = "a system UCX of 1.19 or later, or none: without RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY the wheel's is taken"
_WITH_VERBS = (
    "an image whose system UCX (1.19 to 1.21) is built with verbs, and RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true: the "
    "UCX in the Python wheel has no RDMA"
)


@dataclass(frozen=True, slots=True)
class Ucx:
    """Transports and devices that UCX offers here."""

    version: str
    resources: Mapping[str, Sequence[str]]
    """Devices by transport."""

    @property
    def rdma(self) -> list[str]:
        """Transports over RDMA devices."""
        return sorted(name for name in self.resources if name.split("_")[0] in RDMA)


async def check_ucx(*, has_rdma_device: bool, rdma_required: bool) -> list[Finding]:
    """Opens it in a process of its own."""
    opened = await _open()
    if isinstance(opened, str):
        return [fail(CHECK, opened, _REINSTALL)]
    return [judge(opened, has_rdma_device=has_rdma_device, rdma_required=rdma_required)]


def judge(ucx: Ucx, *, has_rdma_device: bool, rdma_required: bool) -> Finding:
    """Whether blocks can travel between hosts, and by RDMA where there is some."""
    shown = ", ".join(
        name if devices == ["memory"] or not devices else f"{name} ({' '.join(sorted(set(devices)))})"
        for name, devices in sorted(ucx.resources.items())
        if name != "self"
    )
    text = f"UCX {ucx.version}: {shown or 'no transport'}"
    if tuple(int(part) for part in ucx.version.split(".")[:2]) < LEAST_VERSION:
        return fail(CHECK, f"{text}; too old for UCXX", _NEWER)
    if (has_rdma_device or rdma_required) and not ucx.rdma:
        problem = fail if rdma_required else warn
        return problem(CHECK, f"{text}; no RDMA transport", _WITH_VERBS)
    if "tcp" not in ucx.resources and not ucx.rdma:
        return fail(CHECK, f"{text}; nothing that reaches another host", _OTHER_TLS)
    if "cma" not in ucx.resources:
        return warn(CHECK, f"{text}; no CMA: blocks between processes of one host take the network", _WITH_CMA)
    return ok(CHECK, text)


async def _open() -> Ucx | str:
    """UCX's resources, or why they cannot be read."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.preflight.ucx_resources",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "UCX_LOG_FILE": "stderr", "UCX_WARN_UNUSED_ENV_VARS": "n"},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return f"UCX did not open within {TIMEOUT_S:g} s: a device or its driver hangs"
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        last = lines[-1].rpartition("TransferFailed: ")[2] if lines else f"its process ended with {process.returncode}"
        return f"UCX cannot be used: {last}"
    found = json.loads(out)
    return Ucx(found["version"], found["resources"])
