"""What a run leaves behind: one row for each call, distributions, conservation, goodput, cost."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.core.units import MS, S
from windtunnel.sim.calls import NEVER, OUTCOMES, Attempt, Call
from windtunnel.sim.scenario import SloSpec

QUANTILES = (50, 90, 95, 99)
_FLUSH_AT = 1 << 18


@dataclass(slots=True)
class GapHistogram:
    """Inter-token latencies on a logarithmic scale: 400 bins a decade, so a quantile is exact to 0.6 %.

    Owned by the recorder. Gaps of zero (several tokens in one message) have a bin of their own.
    """

    PER_DECADE = 400
    DECADES = 13
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(400 * 13 + 1, np.int64))
    total_ns: int = 0
    max_ns: int = 0

    def add(self, gaps_ns: NDArray[np.int64]) -> None:
        if not gaps_ns.size:
            return
        bins = np.zeros(gaps_ns.size, np.int64)
        positive = gaps_ns > 0
        bins[positive] = 1 + (np.log10(gaps_ns[positive]) * self.PER_DECADE).astype(np.int64)
        self.counts += np.bincount(np.minimum(bins, self.counts.size - 1), minlength=self.counts.size)
        self.total_ns += int(gaps_ns.sum())
        self.max_ns = max(self.max_ns, int(gaps_ns.max()))

    def quantile_ns(self, percent: float) -> float:
        """The middle of the bin in which the quantile lies; 0 without gaps."""
        cumulative = np.cumsum(self.counts)
        if not cumulative[-1]:
            return 0.0
        at = int(np.searchsorted(cumulative, cumulative[-1] * percent / 100))
        return 0.0 if at == 0 else float(min(10 ** ((at - 0.5) / self.PER_DECADE), self.max_ns))

    def summary(self) -> dict[str, float]:
        count = int(self.counts.sum())
        mean_ns = self.total_ns / count if count else 0.0
        quantiles = {f"p{percent}_ms": _ms(self.quantile_ns(percent)) for percent in QUANTILES}
        return {"count": count, "mean_ms": _ms(mean_ns), **quantiles, "max_ms": _ms(self.max_ns)}


class Recorder:
    """Takes every call as it ends. Rows are the per-request log, in the order in which calls ended."""

    def __init__(self, slo: SloSpec, *, keep_rows: bool = True) -> None:
        self.outcomes: Counter[str] = Counter()
        self.ttft_ns: list[int] = []
        self.e2e_ns: list[int] = []
        self.tpot_ns: list[float] = []
        self.ended_s: list[float] = []
        self.gaps = GapHistogram()
        self.good = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.last_end_ns = 0
        self.rows: list[str] = []
        self._keep_rows = keep_rows
        self._slo = slo
        self._pending: list[NDArray[np.int64]] = []
        self._pending_size = 0

    def add(self, call: Call) -> None:
        assert call.outcome is not None, "a call is recorded before its end"
        self.outcomes[call.outcome] += 1
        self.last_end_ns = max(self.last_end_ns, call.ended_ns)
        times = measure(call)
        if call.winner is not None:
            self._add_tokens(call.winner, call.ended_ns)
        if call.outcome == "finished":
            self._add_finished(call, times)
        if self._keep_rows:
            self.rows.append(json.dumps(row(call, times), separators=(",", ":")))

    def _add_tokens(self, attempt: Attempt, until_ns: int) -> None:
        times = np.frombuffer(attempt.times_ns, np.int64)
        gaps = np.diff(times)
        self.output_tokens += times.size
        self.cached_tokens += attempt.cached_tokens
        self._pending.append(gaps)
        self._pending_size += gaps.size
        if self._pending_size > _FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self.gaps.add(np.concatenate(self._pending))
            self._pending, self._pending_size = [], 0

    def _add_finished(self, call: Call, times: Mapping[str, float]) -> None:
        self.prompt_tokens += len(call.question.prompt_token_ids)
        self.ttft_ns.append(int(times["ttft_ns"]))
        self.e2e_ns.append(int(times["e2e_ns"]))
        self.ended_s.append(call.ended_ns / S)
        if "tpot_ns" in times:
            self.tpot_ns.append(times["tpot_ns"])
        self.good += self._is_good(times)

    def _is_good(self, times: Mapping[str, float]) -> bool:
        limits = {"ttft_ns": self._slo.ttft, "tpot_ns": self._slo.tpot, "e2e_ns": self._slo.e2e}
        return all(not limit or times.get(name, 0) <= limit for name, limit in limits.items())


def measure(call: Call) -> dict[str, float]:
    """The client's times of a call that got tokens: from its start to the first, to the end, and per token after the first."""
    attempt = call.winner
    if attempt is None or not attempt.times_ns:
        return {}
    first_ns = attempt.times_ns[0] + attempt.return_ns
    if first_ns > call.ended_ns:
        return {}
    times: dict[str, float] = {"ttft_ns": first_ns - call.started_ns, "e2e_ns": call.ended_ns - call.started_ns}
    tokens = len(attempt.times_ns)
    if tokens > 1:
        times["tpot_ns"] = (attempt.times_ns[-1] - attempt.times_ns[0]) / (tokens - 1)
    return times


def row(call: Call, times: Mapping[str, float]) -> dict[str, Any]:
    """One line of `requests.jsonl`. Times in nanoseconds of virtual time."""
    question = call.question
    attempts = [
        {
            "id": attempt.request_id,
            "engine": None if attempt.engine == NEVER else attempt.engine,
            **({} if attempt.prefill is None else {"prefill": attempt.prefill.engine}),
            "sent_ns": attempt.sent_ns,
            "ended_ns": None if attempt.ended_ns == NEVER else attempt.ended_ns,
            "outcome": attempt.outcome or "in_flight",
            "status": attempt.status,
            "tokens": attempt.received(call.ended_ns) if call.ended_ns != NEVER else len(attempt.times_ns),
            "cached_tokens": attempt.cached_tokens,
        }
        for attempt in call.attempts
    ]
    return {
        "request": question.number,
        "session": question.session,
        "turn": question.turn,
        "at_ns": call.started_ns,
        "prompt_tokens": len(question.prompt_token_ids),
        "max_tokens": question.output_tokens,
        "outcome": call.outcome,
        **times,
        "attempts": attempts,
    }


def distribution(values_ns: Sequence[float]) -> dict[str, float]:
    """Milliseconds: count, mean, quantiles (linear interpolation), max."""
    if not values_ns:
        return {"count": 0, "mean_ms": 0.0, **{f"p{percent}_ms": 0.0 for percent in QUANTILES}, "max_ms": 0.0}
    values = np.asarray(values_ns, np.float64)
    quantiles = zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)
    return {
        "count": len(values_ns),
        "mean_ms": _ms(float(values.mean())),
        **{f"p{percent}_ms": _ms(float(value)) for percent, value in quantiles},
        "max_ms": _ms(float(values.max())),
    }


def _ms(value_ns: float) -> float:
    return round(value_ns / MS, 3)


def conservation(sent: int, outcomes: Mapping[Any, int], in_flight: int) -> dict[str, int]:
    """Raises AssertionError unless every call that was sent has ended once or is in flight."""
    counts: dict[str, int] = {outcome: outcomes.get(outcome, 0) for outcome in OUTCOMES}
    counts["in_flight"] = in_flight
    assert sent == sum(counts.values()), f"sent {sent}, but {counts}"
    return {"sent": sent, **counts}


def write_lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
