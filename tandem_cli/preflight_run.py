"""Runs `tandem preflight`: the checks, or the server that another preflight measures against."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from services.local.spec import DEMO_MODEL
from services.preflight.checks import CheckOptions, check_skipped, run_checks
from services.preflight.component import Component
from services.preflight.finding import Finding, fail, failed
from services.preflight.machine import Machine
from services.preflight.needs import Needs, Overrides, needs_of
from services.preflight.peer.serve import PreflightServer
from services.preflight.report import as_json, print_finding, summary, write_termination_message
from shared.errors import ConfigError
from tandem_cli.failures import EXIT_FAILED

_SETTINGS_CHECK = "settings"


def run(
    component: Component,
    overrides: Overrides,
    flags: Sequence[str],
    options: CheckOptions,
    serve: str,
    termination_log: Path,
    *,
    as_json_: bool,
) -> int:
    """The command's exit status; the arguments are its options."""
    check_skipped([*options.skipped])
    needs: Needs | ConfigError
    try:
        needs = needs_of(component, overrides, flags, DEMO_MODEL)
    except ConfigError as error:
        if serve:
            raise
        needs = error
    if serve:
        assert isinstance(needs, Needs)
        return asyncio.run(_serve(serve, needs.fleet_key))
    console = Console(highlight=False)
    findings = asyncio.run(_check(needs, options, None if as_json_ else console))
    if as_json_:
        print(as_json(component, findings))
    else:
        console.print(f"\n{component}: {summary(findings)}", markup=False)
    if problem := write_termination_message(termination_log, findings):
        print(f"tandem: {problem}", file=sys.stderr)
    return EXIT_FAILED if failed(findings) else 0


async def _check(needs: Needs | ConfigError, options: CheckOptions, console: Console | None) -> list[Finding]:
    """Shows each finding as it comes, where there is a console."""
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        if console is not None:
            print_finding(console, finding)

    if isinstance(needs, ConfigError):
        found(fail(_SETTINGS_CHECK, needs.message, "correct the flag or environment variable; docs/reference.md"))
        return findings
    async for finding in run_checks(needs, options, Machine()):
        found(finding)
    return findings


async def _serve(bind: str, fleet_key: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = PreflightServer(bind, fleet_key, lambda line: print(line, flush=True))
    await server.start()
    print(f"serving on {server.address}; in the other Pod: tandem preflight --peer THIS_POD_IP:PORT", flush=True)
    await stop.wait()
    await server.close()
    return 0
