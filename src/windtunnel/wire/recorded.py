"""Recorded responses: what the simulator "generates" for requests that it has an answer for.

The file is JSON lines. Each line is one answer:

    {"match": {"body": "<sha256>"}, "choices": [{"token_ids": [618, 285], "finish_reason": "length"}]}
    {"match": {"prompt": "The cat"}, "choices": [{"text": " runs the lazy fox", "finish_reason": "stop"}], "cached_tokens": 0}
    {"match": {"prompt_token_ids": [293, 626]}, "choices": [{"text": " runs"}]}

* `match` has exactly one key: `body` is `body_hash` of the request's JSON, `prompt` the rendered prompt text,
  `prompt_token_ids` its tokens. The most exact match wins, in this order.
* Lines with the same match are played in turn: the second request gets the second line, and after the last the first again.
* A choice has `token_ids` or `text`. They hold everything the model would have said, stop strings and stop tokens included,
  but not the tokenizer's own EOS. After the last token the sequence ends: at `max_tokens` with `length`, otherwise by EOS.
* Choices are in the order of the answer; a request with more choices than recorded starts again at the first.
* `cached_tokens` overrides what the prefix cache would report.
* `finish_reason` is documentation: the engine finds it again from tokens, stops and limits.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from windtunnel.core.tokenizer import Tokenizer
from windtunnel.wire.family import Generation, PromptPlan

_MATCHES = ("body", "prompt", "prompt_token_ids")
_CHOICE_KEYS = frozenset({"token_ids", "text", "finish_reason"})
_LINE_KEYS = frozenset({"match", "choices", "cached_tokens", "case"})


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """The token ids of each choice, and the cached prompt tokens where the recording fixes them."""

    choices: tuple[tuple[int, ...], ...]
    cached_tokens: int | None = None

    def choice(self, index: int) -> tuple[int, ...]:
        return self.choices[index % len(self.choices)]


def body_hash(body: bytes) -> str | None:
    """The sha256 of a JSON body with sorted keys and no spaces; None for a body that is no JSON."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class RecordedResponses:
    """Lookup of recorded answers. Immutable after construction."""

    def __init__(self, lines: Iterable[Mapping[str, Any]], tokenizer: Tokenizer) -> None:
        self._by: dict[str, dict[Any, list[RecordedAnswer]]] = {kind: {} for kind in _MATCHES}
        for number, line in enumerate(lines, start=1):
            kind, key = _match(line, number)
            self._by[kind].setdefault(key, []).append(_answer(line, number, tokenizer))

    def __len__(self) -> int:
        return sum(len(answers) for found in self._by.values() for answers in found.values())

    def by_body(self, body: bytes) -> tuple[str, Sequence[RecordedAnswer]] | None:
        """The key and the answers to exactly this request."""
        digest = body_hash(body) if self._by["body"] else None
        answers = self._by["body"].get(digest)
        return None if digest is None or answers is None else (digest, answers)

    def by_prompt(self, prompt: PromptPlan) -> tuple[Any, Sequence[RecordedAnswer]] | None:
        """The key and the answers to any request with this prompt."""
        for kind, key in (("prompt", prompt.text), ("prompt_token_ids", prompt.token_ids)):
            answers = self._by[kind].get(key)
            if answers is not None:
                return (kind, key), answers
        return None


@dataclass(frozen=True, slots=True)
class Playback:
    """The answer to one request: the token ids of each choice (None: nothing recorded), and the cached tokens if fixed."""

    choices: tuple[tuple[int, ...] | None, ...]
    cached_tokens: int | None = None


class RecordedPlayer:
    """Plays recorded answers in turn. Mutable (turn counters, one for each match in the file); owned by one server."""

    def __init__(self, responses: RecordedResponses) -> None:
        self._responses = responses
        self._turns: Counter[Any] = Counter()

    def play(self, body: bytes, prompts: Sequence[PromptPlan], n: int) -> Playback | None:
        """What to "generate" for a request of `prompts`, `n` choices each; None when nothing is recorded for any of it."""
        found = self._responses.by_body(body)
        if found is not None:
            answer = self._next(found)
            return Playback(tuple(answer.choice(at) for at in range(len(prompts) * n)), answer.cached_tokens)
        answers = [self._next(match) if (match := self._responses.by_prompt(prompt)) else None for prompt in prompts]
        if not any(answers):
            return None
        choices = tuple(answer.choice(at) if answer else None for answer in answers for at in range(n))
        fixed = [answer.cached_tokens for answer in answers if answer and answer.cached_tokens is not None]
        return Playback(choices, sum(fixed) if fixed else None)

    def attach(self, generation: Generation, body: bytes) -> Generation:
        """`generation` with its recorded answer, or as it is."""
        played = self.play(body, generation.prompts, generation.sampling.n)
        if played is None:
            return generation
        return replace(generation, recorded=played.choices, recorded_cached_tokens=played.cached_tokens)

    def _next(self, found: tuple[Any, Sequence[RecordedAnswer]]) -> RecordedAnswer:
        key, answers = found
        turn = self._turns[key]
        self._turns[key] += 1
        return answers[turn % len(answers)]


def read_lines(text: str) -> list[dict[str, Any]]:
    """The lines of a responses file. Raises ValueError naming the line that is no JSON object."""
    out = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            out.append(_object(line, number))
    return out


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"responses file, line {number}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"responses file, line {number}: expected a JSON object")
    return value


def _match(line: Mapping[str, Any], number: int) -> tuple[str, Any]:
    unknown = set(line) - _LINE_KEYS
    if unknown:
        raise ValueError(f"responses file, line {number}: unknown key {min(unknown)!r}")
    match = line.get("match")
    if not isinstance(match, Mapping) or len(match) != 1 or next(iter(match)) not in _MATCHES:
        raise ValueError(f"responses file, line {number}: `match` needs exactly one of {', '.join(_MATCHES)}")
    kind, key = next(iter(match.items()))
    return kind, tuple(key) if isinstance(key, list) else key


def _answer(line: Mapping[str, Any], number: int, tokenizer: Tokenizer) -> RecordedAnswer:
    choices = line.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError(f"responses file, line {number}: `choices` must be a list with at least one entry")
    return RecordedAnswer(tuple(_tokens(choice, number, tokenizer) for choice in choices), line.get("cached_tokens"))


def _tokens(choice: Mapping[str, Any], number: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    unknown = set(choice) - _CHOICE_KEYS
    if unknown:
        raise ValueError(f"responses file, line {number}: a choice has no key {min(unknown)!r}")
    if "token_ids" in choice:
        return tuple(int(token) for token in choice["token_ids"])
    if "text" not in choice:
        raise ValueError(f"responses file, line {number}: a choice needs `token_ids` or `text`")
    return tuple(tokenizer.encode(choice["text"], add_special_tokens=False))
