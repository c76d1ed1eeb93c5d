"""Durations read and write exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core.units import format_duration, parse_duration_ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("250ms", 250_000_000),
        ("1.5s", 1_500_000_000),
        ("1m30s", 90_000_000_000),
        ("2h", 7_200_000_000_000),
        ("0", 0),
        (0, 0),
        ("0s", 0),
        (".5ms", 500_000),
        ("3us", 3_000),
        ("3µs", 3_000),
        ("7ns", 7),
    ],
)
def test_good_durations(text: str | int, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize(
    "text", ["", "20", 20, 1.5, "20 ms", "ms", "-1s", "1s ", "1.s", "1x", "1e3s", "٣s", "1s\n", "nan", "infs", None]
)
def test_bad_durations_say_what_is_right(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration: write a number with a unit, such as 250ms"):
        parse_duration_ns(text)


@pytest.mark.parametrize("text", ["1000000001s", "999999999h", "1000000000s1ns", "9" * 99 + "s"])
def test_more_than_a_clock_can_take_is_out_of_range(text: str) -> None:
    with pytest.raises(ValueError, match="out of range: it must be at most 1000000000s"):
        parse_duration_ns(text)


def test_an_endless_text_is_no_duration_and_is_not_repeated_whole() -> None:
    with pytest.raises(ValueError, match="is not a duration") as caught:
        parse_duration_ns("9" * 2_000_000 + "s")
    assert len(str(caught.value)) < 300


@given(st.integers(0, 10**18))
def test_formatting_is_read_back(ns: int) -> None:
    assert parse_duration_ns(format_duration(ns)) == ns


@given(st.text(max_size=12))
def test_nothing_else_escapes(text: str) -> None:
    try:
        ns = parse_duration_ns(text)
    except ValueError:
        return
    assert parse_duration_ns(format_duration(ns)) == ns
