"""What a person sees in the terminal. Everything goes to stderr, so that `--json` leaves stdout to one document."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from windtunnel.lab.experiment import Progress
    from windtunnel.lab.storm import StormEvent

FILE_WIDTH = 160
"""Of what is not a terminal: no table may lose a number there."""
_STYLES = {"confirmed": "bold green", "refuted": "bold red", "mixed": "bold yellow", "inconclusive": "bold blue"}
_SEVERITIES = {"high": "red", "medium": "yellow", "low": "cyan"}
_PHASES = {
    "baseline": "reading the baseline",
    "storm": "victims are leaving",
    "bystanders": "asking as a bystander",
    "later": "counting later streams",
    "quiet": "waiting for quiet metrics",
    "probe": "asking once more",
    "observe": "observing",
}


def _console(*, stderr: bool = True) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    return console


@contextmanager
def storm_watch() -> "Iterator[Callable[[StormEvent], None]]":
    console = _console()
    with console.status("connecting") as status:
        yield lambda event: status.update(f"{_PHASES.get(event.phase, event.phase)} [dim]{event.at_ns / 1e9:.1f} s")


@contextmanager
def experiment_watch(title: str) -> "Iterator[Callable[[Progress], None]]":
    from rich.markup import escape

    console = _console()
    console.print(f"[bold]{escape(title)}")
    with console.status("starting") as status:

        def tell(progress: "Progress") -> None:
            head = f"{progress.arm}, trial {progress.trial + 1} [dim]({progress.done + 1} of {progress.total})[/]"
            if progress.event is not None:
                status.update(f"{head}: {_PHASES.get(progress.event.phase, progress.event.phase)}")
            elif progress.document is not None:
                console.print(f"  {head}: {_trial_line(progress.document)}")

        yield tell


def _trial_line(trial: Mapping[str, Any]) -> str:
    from rich.markup import escape

    if trial["error"]:
        return f"[red]no result: {escape(trial['error'])}"
    bystanders, later = trial["bystanders"], trial["later_streams"]
    harmed = f"[red]{bystanders['harmed']}[/]" if bystanders["harmed"] else "0"
    return f"{harmed} of {bystanders['sent']} bystanders harmed, {later['complete']} of {later['sent']} later streams complete"


def print_storm(document: Mapping[str, Any]) -> None:
    """A storm in words, on stdout."""
    from rich.markup import escape

    console = _console(stderr=False)
    victims, bystanders, later = document["victims"], document["bystanders"], document["later_streams"]
    console.print(f"{victims['left']} of {victims['sent']} victims left; {_trial_line({**document, 'error': None})}")
    quiet = document["quiet_s"]
    console.print(f"leaked: {_leaked(document, ', ')}; {'never quiet again' if quiet is None else f'quiet at {quiet:.2f} s'}")
    for note in document["notes"]:
        console.print(f"[dim]note: {escape(note)}")
    _print_findings(console, document["findings"])
    if not victims["left"] and not document["findings"]:
        console.print("[bold blue]inconclusive[/]: no client left, so nothing was tried")
    elif not (document["findings"] or document["interrupted"]):
        console.print(f"[bold green]clean[/]: {bystanders['sent']} bystanders and {later['sent']} later streams unharmed")
    if document["interrupted"]:
        console.print(f"[bold blue]interrupted[/]: {document['interrupted']}")


def print_experiment(document: Mapping[str, Any], out: Path | None) -> None:
    """The table, the predictions and the verdict, on stdout."""
    from rich.markup import escape

    console = _console(stderr=False)
    console.print(_table(document))
    for one in document["predictions"]:
        mark = {True: "[green]holds[/]", False: "[red]fails[/]", None: "[blue]undecided[/]"}[one["holds"]]
        console.print(f"  {mark}  {escape(one['text'])} [dim]{escape(one['metric'])} {one['operator']} {one['value']}")
    effect = document["effect"]
    if effect["p_value"] is not None:
        low, high = effect["ci95"] or (float("nan"), float("nan"))
        console.print(
            f"{effect['metric']}: control {effect['control']:.3g}, treatment {effect['treatment']:.3g},"
            f" difference {effect['difference']:.3g} (95 % {low:.3g}…{high:.3g}), p = {effect['p_value']:.2g}"
        )
    names: dict[tuple[str, str], int] = {}
    for finding in document["findings"]:
        key = finding["arm"], finding["name"]
        names[key] = names.get(key, 0) + 1
    for (arm, name), trials in names.items():
        console.print(f"finding in {arm}: [bold]{name}[/] in {trials} trial{'s' if trials > 1 else ''}")
    verdict = document["verdict"]
    console.print(f"[{_STYLES[verdict]}]{verdict}[/]: {document['why']}")
    if out is not None:
        console.print(f"report: {out / 'report.html'}")


def _table(document: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("arm", "trial", "bystanders harmed", "by status", "later complete", "leaked", "races"):
        table.add_column(name, justify="left" if name in ("arm", "by status", "leaked") else "right", no_wrap=True)
    for arm, content in document["arms"].items():
        for trial in content["trials"]:
            table.add_row(arm, str(trial["trial"]), *_cells(trial))
    return table


def _cells(trial: Mapping[str, Any]) -> list[str]:
    if trial["error"]:
        return ["not judged", "", "not judged", "unknown", str(trial["race_reports"])]
    bystanders, later = trial["bystanders"], trial["later_streams"]
    statuses = " ".join(f"{status}×{count}" for status, count in bystanders["by_status"].items())
    return [
        f"{bystanders['harmed']} of {bystanders['sent']}",
        statuses,
        f"{later['complete']} of {later['sent']}",
        _leaked(trial, " "),
        str(trial["race_reports"]),
    ]


def _leaked(document: Mapping[str, Any], between: str) -> str:
    leaked = document["leaked"]
    if all(value is None for value in leaked.values()):
        return "not observable"
    return between.join(f"{name} {value:+g}" for name, value in leaked.items() if value) or "nothing"


def _print_findings(console: "Console", findings: list[Mapping[str, Any]]) -> None:
    from rich.markup import escape

    for finding in findings:
        style = _SEVERITIES[finding["severity"]]
        because = f"a consequence of {finding['consequence_of']}" if finding.get("consequence_of") else finding["severity"]
        console.print(f"[bold {style}]{finding['name']}[/] ({because}; usual cause: {finding['usual_cause']})")
        for line in finding["evidence"]:
            console.print(f"  {escape(line)}")
