"""`windtunnel selftest`: the lab, blind, over every planted defect and as many clean servers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.exits import FINDING, OK

if TYPE_CHECKING:
    from windtunnel.lab.selftest import Case, Run


def register(app: typer.Typer) -> None:
    app.command("selftest")(selftest)


def selftest(
    runs: Annotated[int, typer.Option(min=1, max=1_000, help="Servers for each defect; as many clean ones in all")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="This defect only; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order, the prompts and the servers")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=32, help="Servers at a time")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the document to this file, too")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Say how well the lab finds what is planted, and how often it cries wolf.

    Exit codes: 0 every defect is named right in 19 of 20 runs and no clean server raises anything, 1 otherwise, 2 usage.
    """
    import json

    from windtunnel.cli.glue import run_stoppable
    from windtunnel.lab.selftest import run_selftest, selftest_document

    cases = _cases(only or [])
    done = run_stoppable(lambda stop: run_selftest(cases, runs=runs, seed=seed, jobs=jobs, stop=stop, tell=_tell))
    document = selftest_document(done)
    text = json.dumps(document, indent=2)
    if out is not None:
        out.write_text(text + "\n", "utf-8")
    typer.echo(text) if as_json else _print(document)
    raise typer.Exit(OK if document["goal_met"] else FINDING)


def _cases(only: list[str]) -> "list[Case]":
    from windtunnel.cli.glue import fail
    from windtunnel.faults.catalogue import CATALOGUE
    from windtunnel.lab.selftest import FURTHER, Case

    cases = [Case(entry.name, entry.finding) for entry in CATALOGUE.values() if not entry.pair]
    cases += FURTHER
    names = [case.fault for case in cases]
    unknown = sorted(set(only) - set(names))
    if unknown:
        fail(f"--only {unknown[0]!r} is not a defect of the battery; those are {', '.join(names)}")
    return [case for case in cases if not only or case.fault in only]


def _tell(run: "Run", done: int, total: int) -> None:
    name = "clean" if run.case is None else f"{run.case.fault} (due: {run.case.finding})"
    found = ", ".join(run.names) or "nothing"
    typer.echo(f"[{done}/{total}] seed {run.seed} {run.seconds:5.1f} s  {name}: {found}", err=True)


def _print(document: dict[str, Any]) -> None:
    for name, one in document["by_fault"].items():
        seconds = "never" if one["seconds"] is None else f"{one['seconds']:.1f} s"
        also = ", ".join(f"{other} {count}" for other, count in one["also_named"].items())
        after = ", ".join(f"{other} {count}" for other, count in one["consequences"].items())
        typer.echo(
            f"{name}: {one['finding']} in {one['named_right']} of {one['runs']}, after {seconds}"
            f" (also: {also or 'nothing'}; consequences: {after or 'none'})"
        )
    for title, key, total in (("named right", "detection", "faulty"), ("false alarms", "false_alarm", "clean")):
        rate, interval = document[f"{key}_rate"], document[f"{key}_ci95"]
        if rate is not None:
            low, high = interval["low"], interval["high"]
            typer.echo(f"{title}: {rate:.1%} of {document[f'{total}_runs']} runs (95 %: {low:.1%}…{high:.1%})")
    for alarm in document["false_alarms"]:
        typer.echo(f"false alarm, seed {alarm['seed']}: {alarm['unusable'] or alarm['findings']}")
