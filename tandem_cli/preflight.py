"""`tandem preflight`: what this machine lacks, before anything hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.preflight.component import Component


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
    # Imported here: it brings the settings of all services, half the time that any other command would take to start.
    from services.preflight.checks import CheckOptions
    from services.preflight.needs import Overrides
    from tandem_cli.preflight_run import run

    overrides, options = Overrides(model, device, redis_url), CheckOptions(rdma, peer, wait, skip or [])
    raise typer.Exit(run(component, overrides, flags or [], options, serve, termination_log, as_json_=as_json_))
