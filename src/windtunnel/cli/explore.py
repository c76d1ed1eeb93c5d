"""`windtunnel explore`: search the interleavings of a model, replay what was found."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from windtunnel.cli import exits

if TYPE_CHECKING:
    from windtunnel.explore.replay import Line, Story

explore = typer.Typer(no_args_is_help=True, help="Search the interleavings of a model of concurrent processes.")

_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(app: typer.Typer) -> None:
    app.add_typer(explore, name="explore")


@explore.command("list")
def list_(as_json: _AsJson = False) -> None:
    """The scenarios that come with windtunnel, with their parameters."""
    from windtunnel.explore.catalogue import built_in

    rows = [
        {
            "name": scenario.name,
            "summary": scenario.summary,
            "parameters": {
                name: {"default": spec.default, "choices": list(spec.choices), "help": spec.help}
                for name, spec in scenario.model.parameters.items()
            },
        }
        for scenario in built_in()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for scenario in built_in():
        typer.echo(f"{scenario.name}\n    {scenario.summary}")
        for name, spec in scenario.model.parameters.items():
            choices = f" ({' '.join(map(str, spec.choices))})" if spec.choices else ""
            typer.echo(f"    --set {name}={spec.default}{choices}  {spec.help}")


@explore.command()
def run(
    scenario: Annotated[str, typer.Argument(metavar="NAME|FILE.py", help="A built-in scenario, or a file with one Model.")],
    rule: Annotated[str | None, typer.Option(help="The same as --set rule=…")] = None,
    owned: Annotated[bool, typer.Option("--owned", help="The same as --set owned=true")] = False,
    settings: Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the model.")] = [],  # noqa: B006
    search: Annotated[str, typer.Option(help="exhaustive, random or pct.")] = "exhaustive",
    seed: Annotated[int, typer.Option(help="For random and pct.")] = 1,
    schedules: Annotated[int, typer.Option(min=1, help="How many, for random and pct.")] = 2_000,
    steps: Annotated[int, typer.Option(min=1, help="Length of a schedule at most.")] = 200,
    states: Annotated[int, typer.Option(min=1, help="States at most, for exhaustive.")] = 500_000,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time at most.")] = 60.0,
    reduce: Annotated[bool, typer.Option(help="Leave out equivalent schedules.")] = True,
    expect: Annotated[
        str | None, typer.Option(help="Numbers of the invariants that must break: exit 0 if just these do.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where replay files go.")] = Path("out/explore"),
    as_json: _AsJson = False,
) -> None:
    """Look for a schedule that breaks an invariant. Exit 0: none (or as expected), 1: found, 2: usage."""
    from windtunnel.explore import catalogue, report
    from windtunnel.explore.model import ModelError
    from windtunnel.explore.searches import Limits

    if search not in report.SEARCHES:
        _usage(f"--search {search}: must be one of {', '.join(report.SEARCHES)}")
    shorthands = [f"rule={rule}"] * (rule is not None) + ["owned=true"] * owned
    limits = Limits(schedules=schedules, steps=steps, states=states, seconds=seconds)
    expected = _numbers(expect or "")
    try:
        found = catalogue.find(scenario)
        model = catalogue.chosen(found, dict(_pair(text) for text in [*settings, *shorthands]))
        made = report.explore(found, model, search, limits, seed, reduce, out)
    except (ModelError, OSError) as error:
        _usage(str(error))
    typer.echo(json.dumps(report.document(made)) if as_json else report.text(made), nl=as_json)
    broken = {finding.violation.invariant.number for finding in made.findings}
    raise typer.Exit(exits.OK if broken == expected else exits.FINDING)


@explore.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A replay file that `explore run` saved.")],
    html: Annotated[bool, typer.Option("--html", help="Write a time line as one HTML page.")] = False,
    out: Annotated[Path | None, typer.Option(help="The page; by default beside the replay file.")] = None,
    as_json: _AsJson = False,
) -> None:
    """Run a replay file step by step and show what changes. Exit 0: nothing breaks, 1: it breaks again, 2: usage."""
    from windtunnel.explore import catalogue
    from windtunnel.explore import replay as replays
    from windtunnel.explore.machine import Machine
    from windtunnel.explore.model import ModelError
    from windtunnel.explore.timeline import page

    try:
        saved = replays.read(file)
        model = catalogue.find(saved.scenario).model(**saved.parameters)
        story = replays.run(saved, Machine(model))
        target = out or file.with_suffix(".html") if html or out else None
        if target is not None:
            target.write_text(page(story), encoding="utf-8")
    except (ModelError, OSError) as error:
        _usage(str(error))
    typer.echo(json.dumps(replays.document(story)) if as_json else "\n".join(_lines(story)))
    if target is not None:
        typer.echo(f"time line: {target}", err=True)
    raise typer.Exit(exits.FINDING if story.broken else exits.OK)


def _lines(story: "Story") -> Iterable[str]:
    yield f"{story.replay.scenario}: {story.replay.invariant}"
    yield "    " + ", ".join(f"{name} = {value}" for name, value in story.initial)
    for line in story.lines:
        if line.number - 1 == story.replay.healed_at:
            yield "    the faults stop"
        yield f"{line.number:>3} {line.process}: {line.step}"
        yield from (f"        {change.variable}: {change.before} → {change.after}" for change in line.changes)
        if line.offends:
            yield "    ^^^ the write that the breaking step reads"
        if line.breaks:
            yield f"    !!! {_verdict(story, line)}"
    yield "it breaks again" if story.broken else "nothing breaks"


def _verdict(story: "Story", line: "Line") -> str:
    lost = f"turn after turn from here on, it ends badly: {story.replay.invariant}"
    return lost if story.replay.healed_at is not None else f"violated: {story.replay.invariant}"


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        _usage(f"--set {text}: must be NAME=VALUE")
    return name, value


def _numbers(text: str) -> set[int]:
    parts = [part.strip() for part in text.split(",") if part]
    if not all(part.isdecimal() for part in parts):
        _usage(f"--expect {text}: must be numbers of invariants, as in 10,12")
    return {int(part) for part in parts}


def _usage(message: str) -> NoReturn:
    typer.echo(f"windtunnel explore: {message}", err=True)
    raise typer.Exit(exits.USAGE)
