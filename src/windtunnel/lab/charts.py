"""The geometry of a report's drawings: plain numbers and SVG path strings, which the template puts into place.

Both arms' time lines share their scales, so that they can be compared by eye.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]

WIDTH = 560
LEFT, RIGHT = 78, 12
TOP, PLOT_HEIGHT = 26, 104
STRIP_HEIGHT = 20
_PLOT_WIDTH = WIDTH - LEFT - RIGHT
LINES = ("running", "waiting")
STRIPS = ("left", "bystander", "survivor", "later")
_NAMES = {"left": "clients leave", "bystander": "bystanders", "survivor": "survivors", "later": "later streams"}
_MIN_BAND = 7.0


@dataclass(frozen=True, slots=True)
class Mark:
    x: float
    y: float
    good: bool | None
    """None: neither good nor bad (a client leaving)."""
    label: str


@dataclass(frozen=True, slots=True)
class Strip:
    name: str
    y: float
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Band:
    name: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One storm around its time axis."""

    width: int
    height: float
    plot_top: float
    plot_bottom: float
    plot_left: float
    plot_right: float
    bands: tuple[Band, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: Mapping[str, str]
    """Gauge → path; `clients` is how many requests of the lab's own were open."""
    area: str
    strips: tuple[Strip, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class Scale:
    """From data to pixels."""

    x_max: float
    y_max: float

    def x(self, t_s: float) -> float:
        return round(LEFT + _PLOT_WIDTH * min(max(t_s / self.x_max, 0.0), 1.0), 2)

    def y(self, value: float) -> float:
        return round(TOP + PLOT_HEIGHT * (1 - min(value / self.y_max, 1.0)), 2)


def shared_scale(trials: Iterable[Document]) -> Scale:
    """Scales that hold every trial."""
    rows = [row for trial in trials for row in trial["series"]]
    x_max = max((row["t_s"] for row in rows), default=1.0)
    y_max = max((max(row["clients"], *(row["gauges"].get(key, 0) for key in LINES)) for row in rows), default=1.0)
    return Scale(max(x_max, 0.1), max(y_max * 1.08, 1.0))


def timeline(trial: Document, scale: Scale) -> Timeline:
    strips = _strips(trial, scale)
    bottom = TOP + PLOT_HEIGHT
    height = bottom + 10 + STRIP_HEIGHT * len(strips) + 22
    lines = {key: _steps([(row["t_s"], row["gauges"].get(key)) for row in trial["series"]], scale) for key in LINES}
    lines["clients"] = _steps([(row["t_s"], row["clients"]) for row in trial["series"]], scale)
    return Timeline(
        width=WIDTH,
        height=height,
        plot_top=TOP,
        plot_bottom=bottom,
        plot_left=LEFT,
        plot_right=WIDTH - RIGHT,
        bands=_bands(trial, scale),
        x_ticks=tuple(Tick(scale.x(at), f"{at:g}") for at in ticks(scale.x_max, 5)),
        y_ticks=tuple(Tick(scale.y(at), f"{at:g}") for at in ticks(scale.y_max, 3)),
        lines=lines,
        area=_area(lines["running"], bottom),
        strips=strips,
        summary=_summary(trial),
    )


def ticks(top: float, about: int) -> list[float]:
    """Round numbers from 0 to at most `top`."""
    rough = top / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(step * index, 10) for index in range(int(top / step + 1e-9) + 1)]


def _steps(points: Sequence[tuple[float, float | None]], scale: Scale) -> str:
    """A step line: a gauge keeps its value until the next sample."""
    known = [(scale.x(t_s), scale.y(value)) for t_s, value in points if value is not None]
    if not known:
        return ""
    parts = [f"M{known[0][0]:g} {known[0][1]:g}"]
    parts += [f"H{x:g}V{y:g}" for x, y in known[1:]]
    return "".join(parts)


def _area(line: str, bottom: float) -> str:
    if not line:
        return ""
    start = line[1:].split(" ")[0]
    return f"{line}V{bottom:g}H{start}Z"


def _bands(trial: Document, scale: Scale) -> tuple[Band, ...]:
    """The phases; ones too narrow to be seen are left out."""
    out = []
    for phase in trial["phases"]:
        x = scale.x(phase["start_s"])
        width = scale.x(phase["end_s"]) - x
        if width >= _MIN_BAND:
            out.append(Band(phase["name"], x, round(width, 2)))
    return tuple(out)


def _strips(trial: Document, scale: Scale) -> tuple[Strip, ...]:
    out: list[Strip] = []
    for what in STRIPS:
        events = [event for event in trial["events"] if event["what"] == what]
        if not events:
            continue
        y = TOP + PLOT_HEIGHT + 10 + STRIP_HEIGHT * (len(out) + 0.5)
        marks = tuple(Mark(scale.x(one["t_s"]), y, one.get("ok"), _label(one)) for one in events)
        out.append(Strip(_NAMES[what], y, tuple(sorted(marks, key=lambda mark: mark.good is False))))
    return tuple(out)


def _label(event: Document) -> str:
    what = {"left": event.get("detail"), "bystander": f"{event.get('kind')}: {event.get('status') or 'no status'}"}
    return f"{event['t_s']:.3f} s, {what.get(event['what'], event.get('end'))}"


def _summary(trial: Document) -> str:
    name = f"{trial['arm']}, trial {trial['trial']}" if "trial" in trial else "storm"
    bystanders, later = trial["bystanders"], trial["later_streams"]
    return (
        f"{name}: {bystanders['harmed']} of {bystanders['sent']} bystanders harmed,"
        f" {later['complete']} of {later['sent']} later streams complete"
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """A rate and its interval on a shared axis, in pixels."""

    arm: str
    y: float
    x: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True)
class RatePlot:
    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    width: int = WIDTH
    height: int = 104


def rate_plot(effect: Document) -> RatePlot | None:
    """Both arms' rates with their exact intervals, or None when the effect is not a rate."""
    if not effect.get("control_ci95"):
        return None
    top: float = min(1.0, max(effect["control_ci95"][1], effect["treatment_ci95"][1]) * 1.1)

    def x(rate: float) -> float:
        return round(LEFT + _PLOT_WIDTH * min(rate / top, 1.0), 2)

    bars = []
    for index, arm in enumerate(("control", "treatment")):
        low, high = effect[f"{arm}_ci95"]
        hits, total = effect[f"{arm}_counts"]
        text = f"{hits} of {total} = {percent(effect[arm])} ({percent(low)} to {percent(high)})"
        bars.append(Bar(arm, 24 + 30 * index, x(effect[arm]), x(low), x(high), text))
    return RatePlot(tuple(bars), tuple(Tick(x(at), percent(at)) for at in ticks(top, 5)))


def percent(rate: float) -> str:
    value = 100 * rate
    return f"{value:.0f} %" if value in (0, 100) or value >= 10 else f"{value:.1f} %"
