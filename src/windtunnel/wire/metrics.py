"""Metrics as a table and one loop: a small store whose text is that of prometheus_client.

A `MetricSpec` says what a family is; a `Store` holds the families in the order of its table and their children, one for
each tuple of label values. Updates are O(1) (a histogram costs one bisection) and take no lock: whoever owns the store
updates it from one thread. Number formats, the order of labels and the `_created` gauges are those of prometheus_client: it
writes the first text of each child, and `collect` gives it everything.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
"""As vLLM 0.32 with prometheus_client 0.26 answers on `/metrics`."""

CHILD_LIMIT = 4096
"""Children of one family that are shown. Updates of further ones go to a child that is not."""

Kind = Literal["counter", "gauge", "histogram", "summary"]
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One family. `name` is without `_total`; `buckets` are the upper bounds without +Inf."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "histogram") != bool(self.buckets):
            raise ValueError(f"{self.name}: a histogram has buckets, and nothing else has")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{self.name}: buckets must rise")


class Value:
    """A counter or a gauge: a number that its owner changes in place."""

    __slots__ = ("created_s", "value")

    def __init__(self, created_s: float) -> None:
        self.value = 0.0
        self.created_s = created_s

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Summary:
    """A count and a sum."""

    __slots__ = ("count", "created_s", "sum")

    def __init__(self, created_s: float) -> None:
        self.count = 0
        self.sum = 0.0
        self.created_s = created_s

    def observe(self, value: float) -> None:
        self.count += 1
        self.sum += value


class Histogram:
    """Counts for each bucket (not accumulated; the last is +Inf) and a sum."""

    __slots__ = ("bounds", "counts", "created_s", "sum")

    def __init__(self, bounds: Sequence[float], created_s: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.created_s = created_s

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_many(self, values: Iterable[float]) -> None:
        """Like `observe` for each; one call for the inter-token latencies of a whole step."""
        counts, bounds, total = self.counts, self.bounds, self.sum
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum = total

    @property
    def count(self) -> int:
        return sum(self.counts)


Child = Value | Summary | Histogram
C = TypeVar("C", bound=Child)


class _Template(NamedTuple):
    """What the library writes for one child: the HELP and TYPE lines, and its samples (`_created` last) without the numbers."""

    heads: list[str]
    prefixes: list[str]


class Family(Generic[C]):
    """One metric with all its children. Owned by its store."""

    __slots__ = ("_hidden", "_make", "_templates", "children", "spec")

    def __init__(self, spec: MetricSpec, make: Callable[[], C]) -> None:
        self.spec = spec
        self.children: dict[Labels, C] = {}
        self._make = make
        self._hidden = make()
        self._templates: dict[Labels, _Template] = {}

    def child(self, *values: str) -> C:
        """The child with these label values, made at zero when it is new."""
        found = self.children.get(values)
        return found if found is not None else self._new(values)

    def _new(self, values: Labels) -> C:
        if len(values) != len(self.spec.labels):
            raise ValueError(f"{self.spec.name} has the labels {self.spec.labels}, not {len(values)} values")
        if len(self.children) >= CHILD_LIMIT:
            return self._hidden
        made = self.children[values] = self._make()
        return made

    def metric(self, children: Mapping[Labels, C]) -> Metric:
        """These children as prometheus_client has them."""
        made = Metric(self.spec.name, self.spec.help, self.spec.kind)
        for values, child in children.items():
            made.samples += _samples(self.spec, dict(zip(self.spec.labels, values, strict=True)), child)
        return made

    def text(self) -> str:
        """The lines of this family as prometheus_client writes them; it writes each child once, later only numbers change."""
        if not self.children:
            return _library_text(self.metric({}))
        main: list[str] = []
        created: list[str] = []
        for values, child in self.children.items():
            template = self._templates.get(values) or self._learn(values, child)
            lines = [f"{prefix} {_number(value)}" for prefix, value in zip(template.prefixes, _numbers(child), strict=False)]
            if self.spec.kind != "gauge":
                created.append(lines.pop())
            main += lines
        return "\n".join([*template.heads[:2], *main, *template.heads[2:], *created, ""])

    def _learn(self, values: Labels, child: C) -> _Template:
        lines = _library_text(self.metric({values: child})).rstrip("\n").split("\n")
        heads = [line for line in lines if line.startswith("#")]
        made = _Template(heads, [line.rpartition(" ")[0] for line in lines if not line.startswith("#")])
        self._templates[values] = made
        return made


class Store(Collector):
    """Families in the order in which they were added. `clock_s` gives Unix seconds, for the `_created` gauges."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._families: dict[str, Family[Any]] = {}

    def values(self, spec: MetricSpec) -> Family[Value]:
        """Add a family of counters or gauges."""
        return self._add(spec, Family(spec, lambda: Value(self._clock_s())), "counter", "gauge")

    def summaries(self, spec: MetricSpec) -> Family[Summary]:
        return self._add(spec, Family(spec, lambda: Summary(self._clock_s())), "summary")

    def histograms(self, spec: MetricSpec) -> Family[Histogram]:
        return self._add(spec, Family(spec, lambda: Histogram(spec.buckets, self._clock_s())), "histogram")

    def _add(self, spec: MetricSpec, family: Family[C], *kinds: Kind) -> Family[C]:
        if spec.name in self._families or spec.kind not in kinds:
            raise ValueError(f"{spec.name}: a second family of this name, or a {spec.kind} where {' or '.join(kinds)} is meant")
        self._families[spec.name] = family
        return family

    def family(self, name: str) -> Family[Any]:
        """The family of this name. Raises KeyError for one that was not added."""
        return self._families[name]

    def collect(self) -> Iterator[Metric]:
        """The families as prometheus_client reads them."""
        return (family.metric(family.children) for family in self._families.values())

    def text(self) -> bytes:
        """The bytes that `generate_latest` makes of this store, at a fraction of its time: a scrape stops every stream."""
        return "".join([family.text() for family in self._families.values()]).encode()


def _samples(spec: MetricSpec, labels: dict[str, str], child: Child) -> Iterator[Sample]:
    if isinstance(child, Value):
        yield Sample(f"{spec.name}_total" if spec.kind == "counter" else spec.name, labels, child.value)
    else:
        if isinstance(child, Histogram):
            yield from _bucket_samples(spec.name, labels, child)
        yield Sample(f"{spec.name}_count", labels, child.count)
        yield Sample(f"{spec.name}_sum", labels, child.sum)
    if spec.kind != "gauge":
        yield Sample(f"{spec.name}_created", labels, child.created_s)


def _bucket_samples(name: str, labels: dict[str, str], child: Histogram) -> Iterator[Sample]:
    for bound, total in zip((*child.bounds, inf), accumulate(child.counts), strict=True):
        yield Sample(f"{name}_bucket", {**labels, "le": _number(bound)}, total)


def _numbers(child: Child) -> list[float]:
    """The values of `_samples`, in its order; a gauge has no use for the last."""
    if isinstance(child, Value):
        return [child.value, child.created_s]
    if isinstance(child, Histogram):
        running = list(accumulate(child.counts))
        return [*running, running[-1], child.sum, child.created_s]
    return [child.count, child.sum, child.created_s]


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # the library has no types there
    return text


class _One(Collector):
    """A collector of one metric, to have the library write it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _library_text(metric: Metric) -> str:
    return generate_latest(_One(metric)).decode()


def process_metrics() -> CollectorRegistry:
    """The metrics of this process, `python_*` and `process_*`, in the order of a vLLM server."""
    made = CollectorRegistry()
    GCCollector(made)
    PlatformCollector(made)
    ProcessCollector(registry=made)
    return made


def render(*sources: Collector) -> bytes:
    """The text of these sources, one after the other, in the format that `CONTENT_TYPE` names."""
    return b"".join(source.text() if isinstance(source, Store) else generate_latest(source) for source in sources)
