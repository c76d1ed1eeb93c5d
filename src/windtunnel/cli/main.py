"""The command line: one thin function for each sub-command."""

import signal

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


_STOPPABLE = frozenset({"storm", "experiment", "selftest"})
"""They handle SIGINT once they begin (`cli.glue`); until then the entry's handler stands."""


@app.callback()
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version."),
) -> None:
    """A GPU-free test bench for LLM serving."""
    if context.invoked_subcommand not in _STOPPABLE and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
