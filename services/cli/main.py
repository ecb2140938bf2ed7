"""Entry point of the `tandem` command."""

from __future__ import annotations

import sys

import typer

from services.cli.cache import build_cache_app
from services.cli.chat import chat
from services.cli.drain import drain, undrain
from services.cli.explain import explain
from services.cli.failures import EXIT_INTERRUPTED, exit_status, report
from services.cli.fit import fit
from services.cli.generate import generate
from services.cli.preflight import preflight
from services.cli.status import status
from services.cli.up import up
from shared.errors import TandemError


def build_app() -> typer.Typer:
    """All commands."""
    app = typer.Typer(
        name="tandem",
        help="A disaggregated LLM serving cluster: start one, talk to one.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(up)
    app.command()(generate)
    app.command()(chat)
    app.command()(status)
    app.command()(explain)
    app.command()(preflight)
    app.command()(fit)
    app.command()(drain)
    app.command()(undrain)
    app.add_typer(build_cache_app(), name="cache")
    return app


def main() -> None:
    """Runs the command line; exits 0, 2 for what the caller must change, 130 on Ctrl-C, else 1."""
    try:
        build_app()()
    except TandemError as error:
        report(error)
        sys.exit(exit_status(error))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
