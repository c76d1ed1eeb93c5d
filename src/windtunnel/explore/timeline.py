"""A replay as one HTML page that needs nothing else: processes as lanes, time downwards, the offending write marked."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from windtunnel.explore.replay import Line, Story

_LANE = 100
_ROW_PX_MIN = 46
_LINE_PX = 21
_PADDING_PX = 18
_WIDTH_CHARS = 92
_BAND_PX = 30


class Row(NamedTuple):
    line: Line
    column: int
    top_px: int
    height_px: int
    state: dict[str, str]

    @property
    def middle_px(self) -> float:
        return self.top_px + self.height_px / 2

    @property
    def x(self) -> float:
        return (self.column + 0.5) * _LANE


def page(story: Story) -> str:
    """The whole page. No network, no scripts but its own. Processes that take no step have no lane."""
    acting = sorted({line.lane for line in story.lines}) or list(range(len(story.lanes)))
    rows = list(_rows(story, acting))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("windtunnel.explore").joinpath("timeline.html.jinja").read_text("utf-8"))
    return template.render(
        story=story,
        rows=rows,
        lanes=[story.lanes[lane] for lane in acting],
        idle=[name for lane, name in enumerate(story.lanes) if lane not in acting],
        thread=_thread(rows),
        width=len(acting) * _LANE,
        band_px=_BAND_PX,
        height=rows[-1].top_px + rows[-1].height_px if rows else 0,
    )


def _rows(story: Story, acting: Sequence[int]) -> Iterator[Row]:
    top = 0
    for line, values in zip(story.lines, story.states, strict=True):
        height = _height_px(line, max(_WIDTH_CHARS // len(acting), 1))
        top += _BAND_PX if line.number - 1 == story.replay.healed_at else 0
        yield Row(line, acting.index(line.lane), top, height, dict(values))
        top += height


def _height_px(line: Line, lane_chars: int) -> int:
    """Room for the label, as wide as its lane is, and for every change."""
    label_lines = 1 + len(line.step) // lane_chars
    return max(_ROW_PX_MIN, _PADDING_PX + _LINE_PX * max(label_lines, len(line.changes) + line.breaks + line.offends))


def _thread(rows: Sequence[Row]) -> str:
    """An SVG path through the steps in order: whose turn it is."""
    parts = [f"M {rows[0].x} {rows[0].middle_px}"] if rows else []
    for before, row in pairwise(rows):
        middle = (before.middle_px + row.middle_px) / 2
        parts.append(f"C {before.x} {middle} {row.x} {middle} {row.x} {row.middle_px}")
    return " ".join(parts)
