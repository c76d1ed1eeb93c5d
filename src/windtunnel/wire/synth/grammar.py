"""Small context-free grammars: GBNF (`root ::= "a" | b*`) and the plain part of Lark (`start: "a" | b*`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from windtunnel.wire.synth.draw import Draw
from windtunnel.wire.synth.errors import SynthesisError
from windtunnel.wire.synth.regex import compiled

MAX_GRAMMAR_CHARS = 65_536
MAX_STEPS = 20_000
DEEP = 40
_RULE = re.compile(r"^\s*[?!]?([A-Za-z_][\w-]*)\s*(?:\.\d+\s*)?(::=|:)\s*(.*)$")
_TOKEN = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*"i?)|(\[(?:[^\]\\]|\\.)*\])|(/(?:[^/\\]|\\.)+/)|([A-Za-z_][\w-]*)|([()|*+?]))')
_START = ("root", "start")


@dataclass(frozen=True, slots=True)
class _Item:
    """One symbol with how often it may come. `kind`: text, regex, name or group."""

    kind: str
    value: str
    branches: "tuple[tuple[_Item, ...], ...]" = ()
    low: int = 1
    high: int = 1


_TIMES: Mapping[str, tuple[int, int]] = {"*": (0, 2), "+": (1, 3), "?": (0, 1)}
Branches = tuple[tuple[_Item, ...], ...]


class Grammar:
    """A parsed grammar. Immutable."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_GRAMMAR_CHARS:
            raise _invalid(f"{len(source)} characters are over the limit of {MAX_GRAMMAR_CHARS}")
        self._rules = {name: _Parser(text).whole() for name, text in _rules(source)}
        found = [name for name in _START if name in self._rules]
        if not found:
            raise _invalid("no rule is named root or start")
        self._start = found[0]

    def text(self, draw: Draw) -> str:
        return "".join(_Writer(self._rules, draw).branches(self._rules[self._start], 0))


def _invalid(why: str) -> SynthesisError:
    return SynthesisError(f"Invalid grammar specification: {why}")


def _rules(source: str) -> list[tuple[str, str]]:
    """Rules with their right sides; a line that starts no rule continues the one before."""
    out: list[tuple[str, str]] = []
    for number, line in enumerate(source.splitlines(), start=1):
        text = _without_comment(line)
        found = _RULE.match(text)
        if found:
            out.append((found.group(1), found.group(3)))
        elif text.strip().startswith("%"):
            continue
        elif text.strip() and out:
            out[-1] = (out[-1][0], f"{out[-1][1]} {text.strip()}")
        elif text.strip():
            raise _invalid(f"line {number} is no rule: {line.strip()!r}")
    return out


def _without_comment(line: str) -> str:
    quoted = False
    for at, char in enumerate(line):
        if char == '"' and (at == 0 or line[at - 1] != "\\"):
            quoted = not quoted
        if not quoted and (char == "#" or line.startswith("//", at)):
            return line[:at]
    return line


class _Parser:
    """Reads one right side. Mutable: where it stands."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._at = 0

    def whole(self) -> Branches:
        branches = self._branches(0)
        if self._at < len(self._text):
            raise _invalid(f"unexpected {self._text[self._at :].strip()[:20]!r}")
        return branches

    def _branches(self, depth: int) -> Branches:
        if depth > DEEP:
            raise _invalid("groups are nested too deep")
        branches: list[tuple[_Item, ...]] = []
        items: list[_Item] = []
        while True:
            token = self._peek()
            if token in ("", ")"):
                return (*branches, tuple(items))
            self._take()
            if token == "|":
                branches.append(tuple(items))
                items = []
            elif token in _TIMES:
                items = self._repeated(items, token)
            else:
                items.append(self._item(token, depth))

    def _repeated(self, items: list[_Item], token: str) -> list[_Item]:
        if not items:
            raise _invalid(f"{token!r} has nothing to repeat")
        last, (low, high) = items[-1], _TIMES[token]
        return [*items[:-1], _Item(last.kind, last.value, last.branches, low, high)]

    def _item(self, token: str, depth: int) -> _Item:
        if token == "(":
            branches = self._branches(depth + 1)
            if self._peek() != ")":
                raise _invalid("Expected ')'")
            self._take()
            return _Item("group", "", branches)
        if token[0] == '"':
            return _Item("text", _unquoted(token))
        if token[0] in "[/":
            return _Item("regex", token[1:-1] if token[0] == "/" else token)
        return _Item("name", token)

    def _match(self) -> re.Match[str] | None:
        return _TOKEN.match(self._text, self._at)

    def _peek(self) -> str:
        if not self._text[self._at :].strip():
            return ""
        found = self._match()
        if found is None:
            raise _invalid(f"unexpected {self._text[self._at :].strip()[:20]!r}")
        return found.group().strip()

    def _take(self) -> None:
        found = self._match()
        self._at = found.end() if found else len(self._text)


def _unquoted(token: str) -> str:
    inner = token.rstrip("i")[1:-1]
    try:
        return inner.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        raise _invalid(f"{token} is no string") from None


class _Writer:
    """Writes a text. Mutable: the steps that are left."""

    def __init__(self, rules: Mapping[str, Branches], draw: Draw) -> None:
        self._rules = rules
        self._draw = draw
        self._steps = MAX_STEPS

    def branches(self, branches: Branches, depth: int) -> list[str]:
        self._steps -= 1
        if self._steps < 0 or depth > 4 * DEEP:
            raise _invalid("the grammar does not come to an end")
        deep = depth > DEEP
        chosen = min(branches, key=_weight) if deep else branches[self._draw.below(len(branches))]
        return [part for item in chosen for part in self._item(item, depth, deep)]

    def _item(self, item: _Item, depth: int, deep: bool) -> list[str]:
        times = item.low if deep else self._draw.between(item.low, item.high)
        return [part for _ in range(times) for part in self._once(item, depth)]

    def _once(self, item: _Item, depth: int) -> list[str]:
        if item.kind == "text":
            return [item.value]
        if item.kind == "regex":
            return [compiled(item.value).text(self._draw)]
        if item.kind == "group":
            return self.branches(item.branches, depth + 1)
        if item.value not in self._rules:
            raise _invalid(f"rule {item.value!r} is not defined")
        return self.branches(self._rules[item.value], depth + 1)


def _weight(items: Sequence[_Item]) -> int:
    return sum(1000 if item.kind == "name" else 100 if item.kind == "group" else 1 for item in items if item.low)
