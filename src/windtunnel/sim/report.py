"""The report of one run: one HTML file with its plots inside, nothing loaded from anywhere."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.units import MS
from windtunnel.sim.cluster import RunResult
from windtunnel.sim.scenario import Scenario

WIDTH, HEIGHT, MARGIN = 460, 220, 46
_COLOR = "#1f6fb2"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>windtunnel sim</title><style>
body{{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;color:#222;background:#fff}}
table{{border-collapse:collapse;margin:1rem 0}}td,th{{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:right}}
th:first-child,td:first-child{{text-align:left}}figure{{display:inline-block;margin:.5rem}}figcaption{{font-weight:600}}
svg text{{font:11px system-ui,sans-serif;fill:#444}}
</style></head><body>
<h1>windtunnel sim</h1><p>{head}</p>
{tables}
{plots}
</body></html>
"""

Points = NDArray[np.float64]


def report_html(result: RunResult, scenario: Scenario) -> str:
    summary = result.summary
    head = (
        f"{summary['virtual_s']:.1f} s of virtual time, {len(summary['engines'])} engines, policy {escape(summary['policy'])}, "
        f"workload {escape(scenario.workload.kind)}, seed {summary['seed']}"
    )
    return _PAGE.format(head=head, tables="\n".join(_tables(summary)), plots="\n".join(_plots(result)))


def _tables(summary: dict[str, Any]) -> list[str]:
    times = [[name, *summary[name].values()] for name in ("ttft", "itl", "tpot", "e2e")]
    engines = [
        [
            item["engine"],
            item["role"],
            item["routed"],
            item["steps"],
            item["peak_running"],
            item["peak_waiting"],
            *item["sequences"].values(),
        ]
        for item in summary["engines"]
    ]
    sequence_names = list(summary["engines"][0]["sequences"])
    flat = {
        **summary["throughput"],
        **{f"goodput {key}": value for key, value in summary["goodput"].items()},
        **summary["cost"],
    }
    return [
        _table(list(summary["requests"]), [list(summary["requests"].values())]),
        _table(["", *summary["ttft"]], times),
        _table(["", "value"], [[name, value] for name, value in flat.items()]),
        _table(["engine", "role", "routed", "steps", "peak running", "peak waiting", *sequence_names], engines),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _plots(result: RunResult) -> list[str]:
    recorder = result.recorder
    gaps = recorder.gaps
    cumulative = np.cumsum(gaps.counts) / max(1, int(gaps.counts.sum()))
    edges_ms = 10 ** (np.arange(gaps.counts.size) / gaps.PER_DECADE) / MS
    inside = gaps.counts > 0
    return [
        _plot("Time to first token", "ms", "share of calls", *_share(recorder.ttft_ns)),
        _plot("Inter-token latency", "ms", "share of tokens", edges_ms[inside], cumulative[inside]),
        _plot("End to end", "ms", "share of calls", *_share(recorder.e2e_ns)),
        _plot("Finished calls", "s", "calls per second", *_per_second(recorder.ended_s)),
    ]


def _share(values_ns: Sequence[float]) -> tuple[Points, Points]:
    """The empirical distribution function, at most 500 points of it."""
    values = np.sort(np.asarray(values_ns, np.float64)) / MS
    if not values.size:
        return values, values
    at = np.unique(np.linspace(0, values.size - 1, min(500, values.size)).astype(int))
    return values[at], (at + 1) / values.size


def _per_second(ended_s: Sequence[float]) -> tuple[Points, Points]:
    """Calls per second in at most 200 equal spans."""
    if not ended_s:
        return np.zeros(0), np.zeros(0)
    counts, edges = np.histogram(ended_s, bins=min(200, max(1, int(max(ended_s)))))
    return edges[:-1], counts / np.diff(edges)


def _plot(title: str, x_name: str, y_name: str, x: Points, y: Points) -> str:
    if not x.size:
        return f"<figure><figcaption>{title}</figcaption><p>nothing to show</p></figure>"
    x_low, x_high = _axis(float(x.min()), float(x.max()))
    y_low, y_high = 0.0, max(float(y.max()), 1e-9)
    right, bottom = WIDTH - 12, HEIGHT - MARGIN + 10
    pixels_x = MARGIN + (x - x_low) / (x_high - x_low) * (right - MARGIN)
    pixels_y = bottom - (y - y_low) / (y_high - y_low) * (bottom - 10)
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in zip(pixels_x, pixels_y, strict=True))
    ticks = "".join(
        _tick(MARGIN + part * (right - MARGIN), bottom, x_low + part * (x_high - x_low)) for part in (0, 0.25, 0.5, 0.75, 1)
    )
    marks = "".join(
        f'<text x="{MARGIN - 6}" y="{bottom - part * (bottom - 10) + 4:.0f}" text-anchor="end">{part * y_high:.3g}</text>'
        for part in (0, 0.5, 1)
    )
    return (
        f'<figure><figcaption>{title}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}">'
        f'<path d="M{MARGIN},10V{bottom}H{right}" fill="none" stroke="#999"/>{ticks}{marks}'
        f'<polyline points="{path}" fill="none" stroke="{_COLOR}" stroke-width="1.5"/>'
        f'<text x="{(MARGIN + right) // 2}" y="{HEIGHT - 4}" text-anchor="middle">{x_name}</text>'
        f'<text x="{MARGIN + 6}" y="18">{y_name}</text></svg></figure>'
    )


def _tick(x: float, bottom: int, value: float) -> str:
    return f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle">{value:.4g}</text>'


def _axis(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)
