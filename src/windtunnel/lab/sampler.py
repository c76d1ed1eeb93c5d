"""Reads a target's metrics on a fixed cadence, with absolute deadlines so that it does not drift."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from windtunnel.lab.connection import GRPC, Answer, ConnectionCut, MalformedResponse, fetch
from windtunnel.lab.process_facts import process_facts
from windtunnel.lab.record import Sample
from windtunnel.lab.session import Session
from windtunnel.lab.target import (
    METRICS_FLAG,
    UNKNOWN,
    Gauge,
    Kind,
    MetricsUrl,
    Series,
    SettingError,
    Target,
    TargetError,
    Watch,
    gauges_of,
    not_numbers,
    parse_metrics,
    read_counters,
    read_gauges,
    recognise,
)

SAMPLE_LIMIT = 100_000
SCRAPE_TIMEOUT_NS = 5_000_000_000
KV_TOLERANCE = 0.0005
"""Usages are published rounded; two of them this close are equal."""


class ScrapeError(Exception):
    """A scrape that did not give metrics; `status` is None when there was no answer."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class Sampler:
    """Owns the samples of one storm. `phase` is set by the storm."""

    def __init__(self, session: Session, kinds: Sequence[tuple[MetricsUrl, Kind]]) -> None:
        self.samples: list[Sample] = []
        self.phase = "baseline"
        self.kinds = tuple(kinds)
        self.pid: int | None = None
        """The server's process, when it is ours to see."""
        self._session = session
        self._listeners: list[Callable[[Sample], None]] = []
        self.not_numbers: set[str] = set()
        """Gauges that were NaN or infinite in a sample."""

    @property
    def kind(self) -> Kind:
        """The kind of the first source: the one whose grace applies."""
        return self.kinds[0][1] if self.kinds else UNKNOWN

    @property
    def blind(self) -> bool:
        """Whether the target publishes no metrics at all."""
        return not self.kinds

    def gauges(self) -> dict[str, Gauge]:
        watch = self._session.target.watch
        return {gauge.key: gauge for _, kind in self.kinds for gauge in gauges_of(kind, watch)}

    def watches(self) -> dict[str, str]:
        """Gauge key → what it watches."""
        return {key: gauge.watch.value for key, gauge in self.gauges().items()}

    def absent(self, baseline: Sample) -> list[str]:
        """Known gauges that no page has, as `waiting (vllm: vllm:num_requests_waiting)`; not the queues of P/D roles."""
        seen = baseline.gauges.keys() | self.not_numbers
        return [
            f"{gauge.key} ({kind.name}: {' or '.join(gauge.names)})"
            for kind in dict.fromkeys(kind for _, kind in self.kinds)
            for gauge in kind.gauges
            if gauge.watch is not Watch.QUEUE and gauge.key not in seen and not seen & set(gauge.names)
        ]

    def listen(self, listener: Callable[[Sample], None]) -> None:
        self._listeners.append(listener)

    async def run(self, every_ns: int) -> None:
        """Sample until cancelled or the limit is reached. A slot that was missed is skipped, not caught up."""
        due = self._session.now_ns()
        while not self.blind and len(self.samples) < SAMPLE_LIMIT:
            await self.sample()
            due = max(due + every_ns, self._session.now_ns())
            await asyncio.sleep((due - self._session.now_ns()) / 1e9)

    def last_usable(self) -> Sample | None:
        return next((sample for sample in reversed(self.samples) if sample.usable), None)

    async def sample(self) -> Sample:
        """One sample, taken and told to the listeners."""
        session = self._session
        open_before, asked_before, phase = session.clients, session.asked, self.phase
        gauges: dict[str, float] = {}
        counters: dict[str, float] = {}
        bad: set[str] = set()
        status, error = None, None
        at_ns = session.now_ns()
        try:
            for url, kind in self.kinds:
                series = await scrape(session.target, url)
                watched = gauges_of(kind, session.target.watch)
                bad |= not_numbers(series, watched)
                _add(gauges, read_gauges(series, watched))
                _add(counters, read_counters(series, kind.counters))
            status = 200
        except ScrapeError as failure:
            status, error = failure.status, str(failure)
        self.not_numbers |= bad
        _leave_out(gauges, bad, self.gauges())
        clients = open_before + session.asked - asked_before
        process = process_facts(self.pid) if self.pid is not None else {}
        taken = Sample(at_ns, phase, clients, session.opened, gauges, counters, status, error, process)
        self.samples.append(taken)
        for listener in self._listeners:
            listener(taken)
        return taken


def is_quiet(sample: Sample, baseline: Sample, watches: Mapping[str, str]) -> bool:
    """No watched gauge is above its baseline or missing, and none of our own requests is open."""
    return sample.usable and not sample.clients and not unknown(sample, baseline) and not excess(sample, baseline, watches)


def excess(sample: Sample, baseline: Sample, watches: Mapping[str, str]) -> dict[str, float]:
    """By how much each gauge is above its baseline; gauges that are not, and those that cannot be read, are left out."""
    over = {}
    for key, watch in watches.items():
        rise = sample.gauges.get(key, 0.0) - baseline.gauges.get(key, 0.0)
        if rise > (KV_TOLERANCE if watch == Watch.KV.value else 0.0):
            over[key] = rise
    return over


def unknown(sample: Sample, baseline: Sample) -> set[str]:
    """Gauges that could be read before the storm and not in this sample: nothing can be said of them."""
    return set(baseline.gauges) - set(sample.gauges)


async def scrape(target: Target, url: MetricsUrl) -> list[Series]:
    """The series of one source. Raises ScrapeError."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_NS / 1e9):
            answer: Answer = await fetch(url.origin, "GET", url.request_path, target.headers_for(url.origin))
    except TimeoutError:
        raise ScrapeError(f"no answer within {SCRAPE_TIMEOUT_NS / 1e9:g} s", None) from None
    except (OSError, ConnectionCut, MalformedResponse) as error:
        raise ScrapeError(str(error), None) from error
    if answer.status != 200:
        raise ScrapeError(f"status {answer.status}", answer.status)
    series = parse_metrics(answer.body.decode("utf-8", "replace"))
    if not series:
        raise ScrapeError("status 200, but no metrics in the body", answer.status)
    return series


async def recognise_sources(target: Target) -> list[tuple[MetricsUrl, Kind]]:
    """The kind behind each metrics source; one that nobody named, and that answers without metrics, is left out.

    Raises TargetError for a source that does not answer, and for a named one without metrics.
    """
    out = []
    for url in target.metrics:
        try:
            out.append((url, recognise(await scrape(target, url))))
        except ScrapeError as error:
            if url.named:
                raise SettingError(METRICS_FLAG, "metrics_urls", f"{url.shown}: no metrics are there: {error}") from error
            if error.status is not None:
                continue
            hint = f" (name the gRPC worker's metrics with {METRICS_FLAG})" if target.origin.scheme in GRPC else ""
            raise TargetError(f"{url.shown}: {error}{hint}") from error
    return out


def _leave_out(gauges: dict[str, float], names: set[str], known: Mapping[str, Gauge]) -> None:
    """What one source cannot say, the sum over all cannot say either."""
    for key, gauge in known.items():
        if names & set(gauge.names):
            gauges.pop(key, None)


def _add(total: dict[str, float], more: dict[str, float]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value
