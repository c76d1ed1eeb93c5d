"""`windtunnel demo`: the investigations that define windtunnel, small, with a report each."""

from pathlib import Path
from typing import Annotated

import typer

DEMOS = ("cancelled-streams",)


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the reports; one folder for each experiment")] = Path("reports"),
    trials: Annotated[int | None, typer.Option(min=1, max=100, help="Trials of each arm; default: the experiment's")] = None,
) -> None:
    """Repeat the built-in investigations and write a report for each: about a minute."""
    from windtunnel.cli.experiment import run_and_deliver

    verdicts = {name: run_and_deliver(name, out / name, trials) for name in DEMOS}
    for name in verdicts:
        typer.echo(f"open {out / name / 'report.html'} in a browser")
    raise typer.Exit(max(verdicts.values()))
