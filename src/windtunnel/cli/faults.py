"""`windtunnel faults`: the planted defects."""

import json

import typer


def register(app: typer.Typer) -> None:
    app.command("faults")(faults)


def faults(as_json: bool = typer.Option(False, "--json", help="Print one JSON document.")) -> None:
    """List the defects that `serve --fault NAME` can plant."""
    from dataclasses import asdict

    from windtunnel.faults.catalogue import CATALOGUE

    entries = list(CATALOGUE.values())
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries]))
        return
    for entry in entries:
        option = f" [:VALUE, {entry.option}]" if entry.option else ""
        typer.echo(f"{entry.name}{option}\n    {entry.summary}")
        typer.echo(f"    seam: {entry.seam} · models: {', '.join(entry.models)} · finding: {entry.finding}")
