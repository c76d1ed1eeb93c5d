"""The command line: one thin function for each sub-command."""

import typer

from windtunnel import __version__
from windtunnel.cli import (
    calibrate,
    compare,
    debug,
    demo,
    experiment,
    explore,
    faults,
    report,
    router,
    selftest,
    serve,
    sim,
    storm,
    up,
)

app = typer.Typer(name="windtunnel", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"windtunnel {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version."),
) -> None:
    """A GPU-free test bench for LLM serving."""


for command in (
    serve,
    router,
    up,
    storm,
    experiment,
    demo,
    faults,
    report,
    compare,
    selftest,
    calibrate,
    debug,
    sim,
    explore,
):
    command.register(app)


def main() -> None:
    app()
