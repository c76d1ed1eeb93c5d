"""Strangers' values in log lines."""

import json
from typing import Any

import pytest

from windtunnel.core.shown import LIMIT, shown

DEEP: list[Any] = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize("told", ["cmpl-1-0-abc", "host name", "ü", "x" * LIMIT])
def test_a_short_printable_text_is_shown_as_it_is(told: str) -> None:
    assert shown(told) == told


@pytest.mark.parametrize(
    "told",
    [
        "a\nERROR forged",
        "\x1b[2J",
        "\ud800",
        "x" * (LIMIT + 1),
        {"\ud800": "\n"},
        {str(n): "y" * 99 for n in range(99)},
        DEEP,
        10**9999,
    ],
    ids=["newline", "escape", "surrogate", "long", "map", "big map", "deep", "number"],
)
def test_everything_else_is_short_printable_and_on_one_line(told: object) -> None:
    text = shown(told)
    assert 0 < len(text) <= LIMIT and text.isprintable()
    text.encode()
