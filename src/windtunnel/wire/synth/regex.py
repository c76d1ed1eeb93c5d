"""Regular expressions as trees: text made from one, and matching in polynomial time whatever the pattern is.

Python's own parser reads the pattern; look-around and back references are not supported, as in the grammar compilers
that the real servers use.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser as sre  # type: ignore[attr-defined]
from typing import Any

from windtunnel.wire.synth.draw import Draw
from windtunnel.wire.synth.errors import SynthesisError

MAX_PATTERN_CHARS = 4096
MAX_REPEAT = 1000
MAX_CHARS = 20_000
_PREFERRED = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PRINTABLE = _PREFERRED + "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in _PREFERRED)
_FALLBACK = _PRINTABLE + "".join(map(chr, (9, 10, 13, *range(0xA0, 0x180))))
Node = tuple[Any, Any]


class Regex:
    """A parsed pattern. Immutable."""

    def __init__(self, pattern: str) -> None:
        """Raises SynthesisError for a pattern that is wrong, too long or not supported."""
        if len(pattern) > MAX_PATTERN_CHARS:
            raise SynthesisError(
                f"Grammar error: a regex of {len(pattern)} characters is over the limit of {MAX_PATTERN_CHARS}"
            )
        try:
            parsed = sre.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise SynthesisError(f"Grammar error: invalid regex {pattern!r}: {error}") from None
        self._nodes: Sequence[Node] = list(parsed)
        self.longest_chars = max(1, int(parsed.getwidth()[1]))
        """The longest text that it can match; huge for open repeats."""
        _check(self._nodes, pattern)

    def text(self, draw: Draw, extra: int = 0) -> str:
        """A text that the pattern matches as a whole, anchors left aside. `extra` lengthens open repeats."""
        return "".join(_Maker(draw, extra).sequence(self._nodes))

    def search(self, text: str) -> bool:
        """Whether the pattern is found anywhere in `text`."""
        return bool(_ends(self._nodes, text, set(range(len(text) + 1))))

    def full_match(self, text: str) -> bool:
        return len(text) in _ends(self._nodes, text, {0})


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Regex:
    return Regex(pattern)


def _check(nodes: Iterable[Node], pattern: str) -> None:
    for node in _walk(nodes):
        if node[0] not in _SUPPORTED:
            raise SynthesisError(f"Grammar error: regex {pattern!r} uses {str(node[0]).lower()}, which is not supported")


def _walk(nodes: Iterable[Node]) -> Iterator[Node]:
    for op, value in nodes:
        yield op, value
        if op is c.SUBPATTERN:
            yield from _walk(value[3])
        elif op in _REPEATS:
            yield from _walk(value[2])
        elif op is c.BRANCH:
            for branch in value[1]:
                yield from _walk(branch)
        elif op is c.ATOMIC_GROUP:
            yield from _walk(value)


_REPEATS = (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT)
_SUPPORTED = frozenset({c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN, c.BRANCH, c.SUBPATTERN, c.AT, c.MAX_REPEAT, c.MIN_REPEAT})


def accepts(op: Any, value: Any, char: str) -> bool:
    """Whether a node that stands for one character takes `char`."""
    if op is c.LITERAL:
        return bool(ord(char) == value)
    if op is c.NOT_LITERAL:
        return bool(ord(char) != value)
    if op is c.ANY:
        return char != "\n"
    return _in_set(value, char)


def _in_set(items: Sequence[Node], char: str) -> bool:
    negated = bool(items) and items[0][0] is c.NEGATE
    found = any(_item(op, value, char) for op, value in items if op is not c.NEGATE)
    return found is not negated


def _item(op: Any, value: Any, char: str) -> bool:
    if op is c.LITERAL:
        return bool(ord(char) == value)
    if op is c.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    return _category(value, char)


def _category(category: Any, char: str) -> bool:
    for (positive, negative), test in _CATEGORIES.items():
        if category in (positive, negative):
            return test(char) is (category is positive)
    raise SynthesisError(f"Grammar error: regex category {category} is not supported")


_CATEGORIES: dict[tuple[Any, Any], Callable[[str], bool]] = {
    (c.CATEGORY_DIGIT, c.CATEGORY_NOT_DIGIT): str.isdecimal,
    (c.CATEGORY_SPACE, c.CATEGORY_NOT_SPACE): str.isspace,
    (c.CATEGORY_WORD, c.CATEGORY_NOT_WORD): lambda char: char.isalnum() or char == "_",
}


class _Maker:
    """Writes a text for a tree. Mutable: the room that is left."""

    def __init__(self, draw: Draw, extra: int) -> None:
        self._draw = draw
        self._extra = extra
        self._room = MAX_CHARS

    def sequence(self, nodes: Iterable[Node]) -> Iterator[str]:
        for op, value in nodes:
            yield from self._node(op, value)

    def _node(self, op: Any, value: Any) -> Iterator[str]:
        if op is c.AT:
            return
        if op is c.SUBPATTERN:
            yield from self.sequence(value[3])
        elif op is c.BRANCH:
            yield from self.sequence(value[1][self._draw.below(len(value[1]))])
        elif op in _REPEATS:
            yield from self._repeat(value)
        else:
            self._room -= 1
            if self._room < 0:
                raise SynthesisError(f"Grammar error: the shortest text for this regex is over {MAX_CHARS} characters")
            yield self._char(op, value)

    def _repeat(self, value: Any) -> Iterator[str]:
        low, high, inner = value
        if low > MAX_REPEAT:
            raise SynthesisError(f"Grammar error: a repeat of at least {low} is over the limit of {MAX_REPEAT}")
        most = min(int(high) if high is not c.MAXREPEAT else low + 4 + self._extra, low + 4 + self._extra)
        for _ in range(min(low + self._extra, most) if self._extra else self._draw.between(low, most)):
            yield from self.sequence(inner)

    def _char(self, op: Any, value: Any) -> str:
        if op is c.LITERAL:
            return chr(value)
        for alphabet in (_PREFERRED, _PRINTABLE, _FALLBACK):
            fits = [char for char in alphabet if accepts(op, value, char)]
            if fits:
                return fits[self._draw.below(len(fits))]
        for item, inner in value:
            if item in (c.LITERAL, c.RANGE):
                return chr(inner if item is c.LITERAL else inner[0])
        raise SynthesisError("Grammar error: a character class of the regex is empty")


def _ends(nodes: Sequence[Node], text: str, starts: set[int]) -> set[int]:
    """Where a match of `nodes` can end when it begins at one of `starts`."""
    for op, value in nodes:
        starts = _node_ends(op, value, text, starts)
        if not starts:
            break
    return starts


def _node_ends(op: Any, value: Any, text: str, starts: set[int]) -> set[int]:
    if op is c.AT:
        return {at for at in starts if _anchor(value, text, at)}
    if op is c.SUBPATTERN:
        return _ends(list(value[3]), text, starts)
    if op is c.BRANCH:
        return set().union(*(_ends(list(branch), text, starts) for branch in value[1]))
    if op in _REPEATS:
        return _repeat_ends(value, text, starts)
    return {at + 1 for at in starts if at < len(text) and accepts(op, value, text[at])}


def _repeat_ends(value: Any, text: str, starts: set[int]) -> set[int]:
    low, high, inner = value
    nodes = list(inner)
    for _ in range(min(low, len(text) + 1)):
        starts = _ends(nodes, text, starts)
    reached, frontier, count = set(starts), set(starts), low
    while frontier and (high is c.MAXREPEAT or count < high):
        frontier = _ends(nodes, text, frontier) - reached
        reached |= frontier
        count += 1
    return reached


def _anchor(kind: Any, text: str, at: int) -> bool:
    if kind in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
        return at == 0
    if kind is c.AT_END:
        return at == len(text) or (at == len(text) - 1 and text[at] == "\n")
    if kind is c.AT_END_STRING:
        return at == len(text)
    word = [0 <= spot < len(text) and (text[spot].isalnum() or text[spot] == "_") for spot in (at - 1, at)]
    return (word[0] is not word[1]) is (kind is c.AT_BOUNDARY)
