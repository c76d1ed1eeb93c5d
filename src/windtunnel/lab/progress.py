"""What a person sees in the terminal. Everything goes to stderr, so that `--json` leaves stdout to one document."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from windtunnel.lab.experiment import Progress
    from windtunnel.lab.view import StormEvent, StormView

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
    "calm": "streams without a storm",
    "direct": "leaving a worker without the router",
    "drain": "shutting the server down",
}
_STAGES = {"incomplete": "sending", "sent": "waiting for headers", "head": "waiting for text", "tokens": "streaming"}


def _console(*, stderr: bool = True) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    return console


class Watch:
    """Whoever watches a storm; this one says nothing."""

    def event(self, event: "StormEvent") -> None:
        """A phase begins."""

    def view(self, view: "StormView") -> None:
        """How the storm stands, several times a second."""


class Lines(Watch):
    """One line for each phase, finding and lost client, for logs."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._told: set[str] = set()

    def event(self, event: "StormEvent") -> None:
        self._console.print(f"{event.at_ns / 1e9:8.2f} s  {_PHASES.get(event.phase, event.phase)}", markup=False)

    def view(self, view: "StormView") -> None:
        for line in (*_lost_lines(view), *(f"{one.name} ({one.severity.value}): {one.evidence[0]}" for one in view.findings)):
            if line.partition(":")[0] not in self._told:
                self._told.add(line.partition(":")[0])
                self._console.print(f"{view.at_ns / 1e9:8.2f} s  {line}", markup=False)


class Screen(Watch):
    """A picture that is drawn again with each view."""

    def __init__(self, show: "Callable[[RenderableType], None]") -> None:
        self._show = show

    def view(self, view: "StormView") -> None:
        self._show(storm_picture(view))


@contextmanager
def storm_watch(*, quiet: bool = False) -> Iterator[Watch]:
    """A live picture on a terminal, plain lines elsewhere, nothing with `quiet`; all of it on stderr."""
    console = _console()
    if quiet:
        yield Watch()
    elif not console.is_terminal:
        yield Lines(console)
    else:
        from rich.live import Live

        with Live("connecting", console=console, transient=True, refresh_per_second=8) as live:
            yield Screen(live.update)


def storm_picture(view: "StormView") -> "RenderableType":
    """Phase, streams by state, gauges against their baseline, and findings as they appear."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    phase = _PHASES.get(view.phase, view.phase)
    head = Text.assemble((f"{view.at_ns / 1e9:6.1f} s  ", "dim"), (phase, "bold"))
    head.append(f"   {view.opened} of {view.planned} requests opened", "dim")
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="dim")
    rows.add_column()
    rows.add_row("open", _counts({name: view.open_by_stage.get(stage, 0) for stage, name in _STAGES.items()}))
    rows.add_row("ended", _counts(view.ended))
    rows.add_row("bystanders", Text(f"{view.bystanders} asked, {view.harmed} harmed", "red" if view.harmed else ""))
    rows.add_row("gauges", _gauges(view))
    findings = [
        Text(f"{one.name} ({one.severity.value}) ×{one.count}: {one.evidence[0]}", f"bold {_SEVERITIES[one.severity.value]}")
        for one in view.findings
    ]
    return Group(head, rows, *(Text(line, "bold red") for line in _lost_lines(view)), *findings)


def _lost_lines(view: "StormView") -> list[str]:
    return [f"{one.name} {one.why}: {one.requests} requests lost" for one in view.lost_clients]


def _counts(counts: Mapping[str, int]) -> str:
    return "  ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"


def _gauges(view: "StormView") -> "Text":
    """Each gauge, how far it is from its baseline, and in yellow while it is above it."""
    from rich.text import Text

    parts: list[str | tuple[str, str]] = []
    for key, (value, base) in view.gauges.items():
        above = base is not None and value > base
        change = "" if base is None else f" ({value - base:+g})"
        parts += [(f"{key} {value:g}{change}", "yellow" if above else "green"), "  "]
    return Text.assemble(*parts) if parts else Text("none known", "dim")


@contextmanager
def experiment_watch(title: str, *, quiet: bool = False) -> "Iterator[Callable[[Progress], None]]":
    """The picture of the storm in hand, and a line for each trial that has ended; nothing with `quiet`. All on stderr."""
    from rich.console import Group
    from rich.live import Live
    from rich.markup import escape
    from rich.text import Text

    console = _console()
    if quiet:
        yield lambda _progress: None
        return
    console.print(f"[bold]{escape(title)}")
    with Live("starting" if console.is_terminal else "", console=console, transient=True, refresh_per_second=8) as live:

        def tell(progress: "Progress") -> None:
            head = f"{progress.arm}, trial {progress.trial + 1} [dim]({progress.done + 1} of {progress.total})[/]"
            if progress.document is not None:
                live.update("")
                console.print(f"  {head}: {_trial_line(progress.document)}")
            elif progress.view is not None and console.is_terminal:
                live.update(Group(Text.from_markup(head), storm_picture(progress.view)))

        yield tell


def _trial_line(trial: Mapping[str, Any]) -> str:
    from rich.markup import escape

    if trial["error"]:
        return f"[red]no result: {escape(trial['error'])}"
    bystanders, later = trial["bystanders"], trial["later_streams"]
    harmed = f"[red]{bystanders['harmed']}[/]" if bystanders["harmed"] else "0"
    return f"{harmed} of {bystanders['sent']} bystanders harmed, {later['complete']} of {later['sent']} later streams complete"


def print_storm(document: Mapping[str, Any], out: Path | None = None) -> None:
    """A storm in words, on stdout."""
    from rich.markup import escape

    console = _console(stderr=False)
    victims, bystanders, later = document["victims"], document["bystanders"], document["later_streams"]
    console.print(f"{victims['left']} of {victims['sent']} victims left; {_trial_line({**document, 'error': None})}")
    leaked, quiet = _leaked(document, ", "), document["quiet_s"]
    blind = leaked == _UNSEEN and quiet is None
    ended = "" if blind else "; never quiet again" if quiet is None else f"; quiet at {quiet:.2f} s"
    console.print(f"leaked: {leaked}{ended}")
    for note in document["notes"]:
        console.print(f"[dim]note: {escape(note)}")
    _print_findings(console, document["findings"])
    if document["interrupted"]:
        console.print(f"[bold blue]interrupted[/]: {escape(document['interrupted'])}")
    elif document["untried"]:
        console.print(f"[bold blue]inconclusive[/]: {escape(document['untried'])}")
    elif not document["findings"]:
        word, rest = ("no finding", f"; leaks: {_UNSEEN}") if leaked == _UNSEEN else ("clean", "")
        asked = f"{bystanders['sent']} bystanders and {later['sent']} later streams"
        console.print(f"[bold green]{word}[/]: {asked} unharmed{rest}")
    if out is not None:
        console.print(f"report: {out / 'report.html'}")


def print_experiment(document: Mapping[str, Any], out: Path | None) -> None:
    """The table, the predictions and the verdict, on stdout."""
    from rich.markup import escape

    from windtunnel.lab.report import arm_notes

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
    for note in arm_notes(document):
        console.print(f"[dim]{escape(note)}[/]")
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


_UNSEEN = "not observable"


def _leaked(document: Mapping[str, Any], between: str) -> str:
    leaked = document["leaked"]
    if all(value is None for value in leaked.values()):
        return _UNSEEN
    return between.join(f"{name} {value:+g}" for name, value in leaked.items() if value) or "nothing"


def _print_findings(console: "Console", findings: list[Mapping[str, Any]]) -> None:
    from rich.markup import escape

    for finding in findings:
        style = _SEVERITIES[finding["severity"]]
        because = f"a consequence of {finding['consequence_of']}" if finding.get("consequence_of") else finding["severity"]
        console.print(f"[bold {style}]{finding['name']}[/] ({because}; usual cause: {finding['usual_cause']})")
        for line in finding["evidence"]:
            console.print(f"  {escape(line)}")
