"""A replay as one HTML page that needs nothing else: processes as lanes, time downwards, the offending write marked."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from windtunnel.explore.replay import Line, Story

_LANE = 100
_ROW_PX_MIN = 46
_CHANGE_PX = 21
_PADDING_PX = 18


class Row(NamedTuple):
    line: Line
    top_px: int
    height_px: int
    state: dict[str, str]

    @property
    def middle_px(self) -> float:
        return self.top_px + self.height_px / 2

    @property
    def x(self) -> float:
        return (self.line.lane + 0.5) * _LANE


def page(story: Story) -> str:
    """The whole page. No network, no scripts but its own."""
    rows = list(_rows(story))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("windtunnel.explore").joinpath("timeline.html.jinja").read_text("utf-8"))
    height = rows[-1].top_px + rows[-1].height_px if rows else 0
    return template.render(story=story, rows=rows, thread=_thread(rows), width=len(story.lanes) * _LANE, height=height)


def _rows(story: Story) -> Iterator[Row]:
    top, state = 0, dict(story.initial)
    for line in story.lines:
        height = max(_ROW_PX_MIN, _PADDING_PX + _CHANGE_PX * len(line.changes))
        state = state | {change.variable: change.after for change in line.changes}
        yield Row(line, top, height, state)
        top += height


def _thread(rows: Sequence[Row]) -> str:
    """An SVG path through the steps in order: whose turn it is."""
    path = []
    for before, row in zip([None, *rows], rows, strict=False):
        middle = (before.middle_px + row.middle_px) / 2 if before else 0
        path.append(
            f"C {before.x} {middle} {row.x} {middle} {row.x} {row.middle_px}" if before else f"M {row.x} {row.middle_px}"
        )
    return " ".join(path)
