"""Kernels that begin while the one before them ends (programmatic dependent launch, compute capability 9.0 and later).

A kernel of a decode step lasts 3 to 80 µs, and the device is idle for about one between two. A launch marked by
`shared.kernels.device.overlap` may set up its programs in that time.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803  # compile-time arguments are upper case

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_kernels_before(OVERLAPS: tl.constexpr):
    """Waits until the kernel before has ended and its writes are seen; then the kernel behind may set up its programs.

    Each program of a kernel that is launched so calls this before it reads what another kernel wrote, before its first
    write, and before it returns: a kernel counts as ended once its programs have, so one that had not waited would end
    before those in front of it.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
