"""Output parsers: the qwen3 reasoning parser and the hermes tool parser, incremental and whole.

Both read text, hold back what could be the beginning of a tag, and know nothing of chunks. Rules from the recordings:

* qwen3: everything up to `</think>` is reasoning, with or without `<think>` in front; the tags themselves are not shown.
* hermes: a call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; when streaming, the name comes first and alone,
  then the arguments' JSON text as it is written. A whole answer whose calls are not complete JSON is plain content.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

THINK_START, THINK_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_HELD_CHARS = 4096
"""What of an unfinished call is looked at again with each piece: its name, and what leads to its arguments, may be so long."""
REASONING_PARSERS = frozenset({"qwen3", "deepseek_r1"})
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


class Piece(NamedTuple):
    """What a parser found next. `kind` is `content`, `reasoning`, `name` or `arguments`; `call` counts tool calls."""

    kind: str
    text: str
    call: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text."""


class Parser(Protocol):
    """Turns the text of one choice into pieces. Mutable; one per choice."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the answer."""
        ...


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of `text` could begin `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class ReasoningParser:
    """qwen3. `after` reads what comes behind the reasoning."""

    def __init__(self, after: Parser) -> None:
        self._after = after
        self._buffer = ""
        self._ended = False
        self._started = False

    def push(self, text: str) -> list[Piece]:
        if self._ended:
            return self._after.push(text)
        self._buffer += text
        before, tag, rest = self._buffer.partition(THINK_END)
        if tag:
            self._ended = True
            return self._reasoning(self._without_start(before)) + self._after.push(rest)
        held = max(held_back(self._buffer, THINK_END), 0 if self._started else held_back(self._buffer, THINK_START))
        shown = self._without_start(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return self._reasoning(shown)

    def finish(self) -> list[Piece]:
        return self._after.finish() if self._ended else self._reasoning(self._without_start(self._buffer))

    def _without_start(self, text: str) -> str:
        before, tag, rest = text.partition(THINK_START)
        if self._started or not tag:
            return text
        self._started = True
        return before + rest

    @staticmethod
    def _reasoning(text: str) -> list[Piece]:
        return [Piece("reasoning", text)] if text else []


class ContentParser:
    """Everything is content."""

    def push(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class HermesParser:
    """hermes. State: the text not yet explained, and where in a call it stands."""

    def __init__(self) -> None:
        self._buffer = ""
        self._call = -1
        self._place = "content"
        self._json = _JsonEnd()

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Held-back content is shown; half a call is not."""
        rest = self._buffer if self._place == "content" else ""
        self._buffer = ""
        return [Piece("content", rest)] if rest.strip() and self._call < 0 else []

    def _step(self, pieces: list[Piece]) -> bool:
        """One step; False when more text is needed."""
        return bool(getattr(self, f"_in_{self._place}")(pieces))

    def _in_content(self, pieces: list[Piece]) -> bool:
        before, tag, rest = self._buffer.partition(CALL_START)
        held = 0 if tag else held_back(self._buffer, CALL_START)
        shown = before[: len(before) - held]
        if shown and not (self._call >= 0 and not shown.strip()):
            pieces.append(Piece("content", shown))
        self._buffer = rest if tag else before[len(before) - held :]
        if tag:
            self._call += 1
            self._place = "name"
        return bool(tag)

    def _in_name(self, pieces: list[Piece]) -> bool:
        found = _NAME.search(self._buffer)
        if found is None:
            return self._leave_at_end()
        pieces.append(Piece("name", _unescaped(found.group(1)), self._call))
        self._buffer = self._buffer[found.end() :]
        self._place = "arguments_start"
        return True

    def _in_arguments_start(self, pieces: list[Piece]) -> bool:
        found = _ARGUMENTS.search(self._buffer)
        if found is None or found.end() == len(self._buffer):
            return self._leave_at_end()
        self._buffer = self._buffer[found.end() :]
        self._json = _JsonEnd()
        self._place = "arguments"
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        end = self._json.find(self._buffer)
        shown = self._buffer if end is None else self._buffer[:end]
        if shown:
            pieces.append(Piece("arguments", shown, self._call))
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._place = "tail"
        return end is not None

    def _in_tail(self, pieces: list[Piece]) -> bool:
        return self._leave_at_end()

    def _leave_at_end(self) -> bool:
        _before, tag, rest = self._buffer.partition(CALL_END)
        if tag:
            self._buffer, self._place = rest, "content"
        else:
            self._buffer = self._buffer[-_HELD_CHARS:]
        return bool(tag)


def _unescaped(text: str) -> str:
    """What stands between the quotes of a JSON string; as it stands if it is none."""
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


class _JsonEnd:
    """Finds the end of one JSON value in text that arrives in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Where the value ends in `text` (the position behind it), or None."""
        for at, char in enumerate(text):
            if self._take(char):
                return at + 1
        return None

    def _take(self, char: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return not self._in_string and self._depth == 0
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


def make_parser(*, reasoning: bool, tools: bool) -> Parser | None:
    """The parser of a choice; None when its text is content as it is."""
    after: Parser = HermesParser() if tools else ContentParser()
    if reasoning:
        return ReasoningParser(after)
    return after if tools else None


def split_reasoning(text: str) -> tuple[str | None, str | None]:
    """(reasoning, content) of a whole answer; None where there is nothing."""
    before, tag, rest = text.partition(THINK_END)
    start, found, after = before.partition(THINK_START)
    reasoning = start + after if found else before
    return reasoning or None, (rest or None) if tag else None


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """(content in front of the calls, the calls) of a whole answer; no calls when any of them is not JSON."""
    try:
        calls = tuple(_call(first or second) for first, second in _CALL.findall(text))
    except (ValueError, KeyError, TypeError):
        return text, ()
    return (text.partition(CALL_START)[0], calls) if calls else (text, ())


def _call(text: str) -> ToolCall:
    value: Any = json.loads(text)
    return ToolCall(str(value["name"]), json.dumps(value["arguments"], ensure_ascii=False))


def reasoning_tokens(token_ids: Sequence[int], start: int | None, end: int | None, eos: frozenset[int]) -> int:
    """How many tokens of an answer are reasoning: up to `</think>`, without the tags and without EOS."""
    counted = 0
    for token in token_ids:
        if token == end:
            break
        counted += token != start and token not in eos
    return counted
