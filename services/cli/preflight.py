"""`tandem preflight`: what this machine lacks, before anything hangs."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.failures import EXIT_FAILED
from services.local.spec import DEMO_MODEL
from services.preflight.checks import Wishes, check_skipped, run_checks
from services.preflight.finding import Finding, fail, failed
from services.preflight.machine import Machine
from services.preflight.needs import Component, Needs, Overrides, needs_of
from services.preflight.peer.serve import PreflightServer
from services.preflight.report import as_json, print_finding, summary, write_termination_message
from shared.errors import ConfigError

_SETTINGS_CHECK = "settings"


def preflight(
    component: Annotated[Component, typer.Option(help="What would run here.")] = Component.ALL,
    flags: Annotated[
        list[str] | None, typer.Argument(help="After --: the flags that the component would be started with.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(envvar="TANDEM_PREFLIGHT_MODEL", help="Model folder; else the component's setting.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(envvar="TANDEM_PREFLIGHT_DEVICE", help="cpu, cuda or cuda:N; else the setting.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(envvar="TANDEM_PREFLIGHT_REDIS_URL", help="Redis or Valkey; else the setting.")
    ] = None,
    rdma: Annotated[
        bool, typer.Option("--rdma", envvar="TANDEM_PREFLIGHT_RDMA", help="RDMA is required: none is a failure.")
    ] = False,
    peer: Annotated[
        str, typer.Option(envvar="TANDEM_PREFLIGHT_PEER", help="host:port of a preflight that serves: measure there.")
    ] = "",
    serve: Annotated[
        str, typer.Option(help="host:port to be measured at, until Ctrl-C; nothing is checked meanwhile.")
    ] = "",
    wait: Annotated[
        float,
        typer.Option(min=0.0, envvar="TANDEM_PREFLIGHT_WAIT", help="Seconds for Redis and the peer to appear."),
    ] = 0.0,
    skip: Annotated[list[str] | None, typer.Option(help="A check to leave out; may be repeated.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    termination_log: Annotated[
        Path, typer.Option(help="What has failed is written there, if the file exists: a Pod's status shows it.")
    ] = Path("/dev/termination-log"),
) -> None:
    """Check what a component needs of this machine; exit 1 if it would not start."""
    skipped = skip or []
    check_skipped(skipped)
    needs: Needs | ConfigError
    try:
        needs = needs_of(component, Overrides(model, device, redis_url), flags or [], DEMO_MODEL)
    except ConfigError as error:
        if serve:
            raise
        needs = error
    if serve:
        assert isinstance(needs, Needs)
        raise typer.Exit(asyncio.run(_serve(serve, needs.fleet_key)))
    wishes = Wishes(rdma, peer, wait, skipped)
    console = Console(highlight=False)
    findings = asyncio.run(_check(needs, wishes, None if as_json_ else console))
    if as_json_:
        print(as_json(component, findings))
    else:
        console.print(f"\n{component}: {summary(findings)}", markup=False)
    if problem := write_termination_message(termination_log, findings):
        print(f"tandem: {problem}", file=sys.stderr)
    raise typer.Exit(EXIT_FAILED if failed(findings) else 0)


async def _check(needs: Needs | ConfigError, wishes: Wishes, console: Console | None) -> list[Finding]:
    """Shows each finding as it comes, where there is a console."""
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        if console is not None:
            print_finding(console, finding)

    if isinstance(needs, ConfigError):
        found(fail(_SETTINGS_CHECK, needs.message, "correct the flag or environment variable; docs/reference.md"))
        return findings
    async for finding in run_checks(needs, wishes, Machine()):
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
