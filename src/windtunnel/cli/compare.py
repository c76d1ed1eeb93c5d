"""`windtunnel compare DIR DIR`: two results of experiments or of storms, before and after."""

from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.cli.exits import FINDING, OK


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    before: Annotated[Path, typer.Argument(help="A folder that experiment run --out, or storm --out, has written")],
    after: Annotated[Path, typer.Argument(help="Another one")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Say what changed. Exit codes: 0 nothing got worse, 1 something did or there is a new finding, 2 usage."""
    import json

    from windtunnel.cli.glue import fail
    from windtunnel.lab.compare import compare as compare_documents

    try:
        document = compare_documents(_load(before), _load(after))
    except ValueError as error:
        fail(f"{before} and {after}: {error}")
    typer.echo(json.dumps(document, indent=2)) if as_json else _print(document)
    raise typer.Exit(FINDING if document["worse"] else OK)


def _load(folder: Path) -> dict[str, Any]:
    import json

    from windtunnel.cli.glue import fail
    from windtunnel.lab.report import RESULT_NAME, DocumentError, check_document

    source = folder / RESULT_NAME
    try:
        document: dict[str, Any] = json.loads(source.read_text("utf-8"))
        check_document(document)
    except OSError as error:
        fail(f"{source}: {error.strerror}")
    except (ValueError, DocumentError) as error:
        fail(f"{source}: {error}")
    return document


def _print(document: dict[str, Any]) -> None:
    if not document["same_storm"]:
        typer.echo("note: the two runs had different storms")
    for row in document["metrics"]:
        if row["arm"] == "storm" and row["before"] != row["after"]:
            typer.echo(f"{row['metric']}: {row['before']:.3g} → {row['after']:.3g} (one storm each: not tested)")
        if row["change"] != "none":
            numbers = f"{row['before']:.3g} → {row['after']:.3g} (p = {row['p_corrected']:.2g}, corrected)"
            typer.echo(f"{row['change']}: {row['arm']} {row['metric']}: {numbers}")
    for one in document["findings"]:
        for key in ("new", "gone", "both"):
            for name in one[key]:
                typer.echo(f"finding {key if key != 'both' else 'in both'}: {one['arm']} {name}")
    unchanged = sum(row["change"] == "none" for row in document["metrics"])
    typer.echo(f"{unchanged} of {len(document['metrics'])} metrics did not change significantly")
