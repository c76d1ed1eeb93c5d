"""`windtunnel report DIR`: the HTML report and the JUnit file of a result again."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    folder: Annotated[Path, typer.Argument(help="A folder that experiment run --out or storm --out has written")],
) -> None:
    """Write report.html and junit.xml from result.json."""
    import json

    from windtunnel.cli.glue import fail
    from windtunnel.lab.report import RESULT_NAME, DocumentError, check_document, write_all

    source = folder / RESULT_NAME
    try:
        document = json.loads(source.read_text("utf-8"))
        check_document(document)
    except OSError as error:
        fail(f"{source}: {error.strerror}")
    except ValueError as error:
        fail(f"{source}: not JSON: {error}")
    except DocumentError as error:
        fail(f"{source}: {error}")
    for path in write_all(document, folder):
        typer.echo(path)
