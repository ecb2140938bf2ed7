"""Whether two machines' clocks agree."""

from __future__ import annotations

from services.preflight.finding import Finding, fail, ok, warn

CHECK = "clock"
WARN_S = 1.0
"""Beyond it, logs and traces of two machines cannot be read as one."""
FAIL_S = 60.0
"""Beyond it, fresh certificates and tokens may be refused."""
_FIX = "run chrony or systemd-timesyncd on the nodes: chronyc tracking, timedatectl"


def check_skew(other: str, ahead_s: float, error_s: float) -> Finding:
    """`ahead_s`: the other's clock minus ours, known to within `error_s`. Seconds."""
    text = f"{other}: its clock is {abs(ahead_s) * 1000:.0f} ms {'ahead of' if ahead_s > 0 else 'behind'} ours"
    text += f" (±{error_s * 1000:.0f} ms)"
    least = max(0.0, abs(ahead_s) - error_s)
    if least > FAIL_S:
        return fail(CHECK, text, _FIX)
    return warn(CHECK, text, _FIX) if least > WARN_S else ok(CHECK, text)
