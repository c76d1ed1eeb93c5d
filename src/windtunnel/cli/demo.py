"""`windtunnel demo`: the investigations that define windtunnel, small, with a report each."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from windtunnel.cli.exits import FINDING, INCONCLUSIVE, OK


class Demo(NamedTuple):
    """One investigation as the demo repeats it."""

    name: str
    verdict: str
    """What the investigation found, so what the demo must find again."""
    time_scale: float = 1.0
    trials: int | None = None


DEMOS = (Demo("cancelled-streams", "confirmed"), Demo("pd-abort-storm", "mixed", time_scale=10.0, trials=1))


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the reports; one folder for each experiment")] = Path("reports"),
    trials: Annotated[int | None, typer.Option(min=1, max=100, help="Trials of each arm; default: the experiment's")] = None,
) -> None:
    """Repeat the built-in investigations and write a report for each: about two minutes.

    Exit codes: 0 when each comes out as it did then, 1 when one does not, 3 when one is inconclusive.
    """
    from windtunnel.cli.experiment import run_and_deliver

    codes = []
    for one in DEMOS:
        verdict = run_and_deliver(one.name, out / one.name, trials or one.trials, one.time_scale)
        codes.append(OK if verdict == one.verdict else INCONCLUSIVE if verdict == "inconclusive" else FINDING)
        typer.echo(f"{one.name}: {verdict}; the investigation found: {one.verdict}")
    for one in DEMOS:
        typer.echo(f"open {out / one.name / 'report.html'} in a browser")
    raise typer.Exit(max(codes))
