"""The store: its rules, and that its text is prometheus_client's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client import Summary as LibrarySummary

from windtunnel.wire.metrics import CHILD_LIMIT, Histogram, MetricSpec, Store, process_metrics, render

HISTOGRAM = MetricSpec("t:h", "histogram", "An h", ("a",), (0.5, 1, 2.5))
COUNTER = MetricSpec("t:c", "counter", "A c", ("z", "a"))
GAUGE = MetricSpec("t:g", "gauge", "A g")
SUMMARY = MetricSpec("t:s", "summary", "An s", ("a",))


def store() -> Store:
    return Store(lambda: 1.5e9)


def without_created(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if "_created" not in line]


def test_text_is_that_of_the_library() -> None:
    ours, theirs = store(), CollectorRegistry()
    ours.histograms(HISTOGRAM).child('x"y').observe_many([0.5, 0.6, 7])
    ours.values(COUNTER).child("1", "é\n").inc(3)
    ours.values(GAUGE).child().value = 12345678.9
    ours.summaries(SUMMARY).child("x").observe(1e21)
    histogram = LibraryHistogram("t:h", "An h", ["a"], registry=theirs, buckets=(0.5, 1, 2.5))
    for value in (0.5, 0.6, 7):
        histogram.labels('x"y').observe(value)
    Counter("t:c", "A c", ["z", "a"], registry=theirs).labels("1", "é\n").inc(3)
    Gauge("t:g", "A g", registry=theirs).set(12345678.9)
    LibrarySummary("t:s", "An s", ["a"], registry=theirs).labels("x").observe(1e21)
    assert without_created(render(ours)) == without_created(generate_latest(theirs))
    assert render(ours).count(b"_created{") == generate_latest(theirs).count(b"_created{") == 3
    assert b't:c_created{a="\xc3\xa9\\n",z="1"} 1.5e+09\n' in render(ours)


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0, 1e22)), max_size=5))
def test_text_is_generate_latest_of_the_store(updates: list[tuple[str, float]]) -> None:
    made = store()
    histograms, counters = made.histograms(HISTOGRAM), made.values(COUNTER)
    gauge, summaries = made.values(GAUGE).child(), made.summaries(SUMMARY)
    assert made.text() == generate_latest(made)
    for label, value in updates:
        histograms.child(label).observe(value)
        counters.child(label, "b").inc(value)
        gauge.value = -value
        summaries.child(label).observe(value)
        assert made.text() == generate_latest(made)


@given(st.lists(st.floats(0, 10, allow_nan=False)), st.lists(st.floats(0, 10, allow_nan=False)))
def test_histogram_counts_and_sum_are_those_of_its_values(one_by_one: list[float], batch: list[float]) -> None:
    histogram = Histogram((0.5, 1, 2.5), 0.0)
    for value in one_by_one:
        histogram.observe(value)
    histogram.observe_many(batch)
    values = one_by_one + batch
    assert histogram.count == len(values)
    assert math.isclose(histogram.sum, sum(values), abs_tol=1e-9)
    for index, bound in enumerate(histogram.bounds):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)


def test_observe_times_is_observe_repeated() -> None:
    histogram = Histogram((1, 2), 0.0)
    histogram.observe(1.5, times=4)
    assert (histogram.counts, histogram.sum) == ([0, 4, 0], 6.0)


def test_child_is_the_same_object() -> None:
    family = store().values(COUNTER)
    assert family.child("1", "2") is family.child("1", "2")
    assert family.child("1", "2") is not family.child("2", "1")


def test_children_are_limited() -> None:
    made = store()
    family = made.values(MetricSpec("t:c", "counter", "A c", ("a",)))
    for number in range(CHILD_LIMIT + 10):
        family.child(str(number)).inc()
    assert len(family.children) == CHILD_LIMIT
    assert render(made).count(b"t:c_total{") == CHILD_LIMIT


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MetricSpec("t:x", "histogram", "x"), "a histogram has buckets"),
        (lambda: MetricSpec("t:x", "counter", "x", (), (1,)), "nothing else has"),
        (lambda: MetricSpec("t:x", "histogram", "x", (), (2, 1)), "buckets must rise"),
        (lambda: store().values(HISTOGRAM), "a histogram where counter or gauge"),
        (lambda: store().values(COUNTER).child("1"), r"has the labels \('z', 'a'\), not 1 values"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_a_second_family_of_a_name_is_refused() -> None:
    made = store()
    made.values(GAUGE)
    with pytest.raises(ValueError, match="a second family"):
        made.values(GAUGE)


def test_sources_are_written_in_their_order() -> None:
    made = store()
    made.values(GAUGE).child()
    lines = render(process_metrics(), made).decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert names[0] == "python_gc_objects_collected_total"
    assert names[-1] == "t:g"
    assert "process_resident_memory_bytes" in names
