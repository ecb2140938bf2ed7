"""Entry point of the `tandem` command."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from shared.environment import check_variables
from shared.errors import InvalidRequest, TandemError, brief
from tandem_cli import EXIT_INTERRUPTED
from tandem_cli.cache import build_cache_app
from tandem_cli.chat import chat
from tandem_cli.dataclass_options import spread
from tandem_cli.drain import drain, undrain
from tandem_cli.elsewhere import ServeCommand
from tandem_cli.explain import explain
from tandem_cli.failures import EXIT_INVALID, exit_status, report
from tandem_cli.fit.command import fit
from tandem_cli.generate import generate
from tandem_cli.preflight import preflight
from tandem_cli.quantize import quantize
from tandem_cli.record.command import record
from tandem_cli.status import status
from tandem_cli.top import top
from tandem_cli.up import up

DISTRIBUTION = "tandem-llm"


def build_app() -> typer.Typer:
    """The `tandem` command with all subcommands."""
    app = typer.Typer(
        name="tandem",
        help="A disaggregated LLM serving cluster: start one, talk to one.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command("serve", cls=ServeCommand)(spread(up))
    app.command("up", cls=ServeCommand, hidden=True)(spread(up))
    app.command()(spread(generate))
    app.command()(spread(chat))
    app.command()(spread(status))
    app.command()(spread(top))
    app.command()(spread(explain))
    app.command()(preflight)
    app.command()(spread(fit))
    app.command()(spread(record))
    app.command()(quantize)
    app.command()(spread(drain))
    app.command()(spread(undrain))
    app.add_typer(build_cache_app(), name="cache")
    return app


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=lambda on: on and _version())
    ] = False,
) -> None:
    pass


def _version() -> None:
    from importlib import metadata  # it brings the email package

    print(f"tandem {metadata.version(DISTRIBUTION)}")
    raise typer.Exit


def flags_of(command: object, arguments: Sequence[str]) -> set[str]:
    """The flags of the command that the arguments name."""
    names = iter([argument for argument in arguments if not argument.startswith("-")])
    while isinstance(command, TyperGroup):
        command = command.commands.get(next(names, ""))
    return (
        {flag for parameter in command.params for flag in parameter.opts}
        if isinstance(command, TyperCommand)
        else set()
    )


def main() -> None:
    """Runs the command line; exits 0, 2 for what the caller must change, 130 on Ctrl-C, else 1."""
    gc.freeze()  # what is imported stays: no collection looks through it, not even the one at the end
    command = typer.main.get_command(build_app())
    try:
        check_variables(())
        command(prog_name="tandem")
    except TandemError as error:
        report(error, flags_of(command, sys.argv[1:]))
        sys.exit(exit_status(error))
    except (UnicodeEncodeError, UnicodeDecodeError) as error:  # in an argument, from stdin, or on a terminal without it
        report(InvalidRequest(f"{brief(repr(error.object))}: {error}"))
        sys.exit(EXIT_INVALID)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
