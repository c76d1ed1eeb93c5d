"""Trace files as workloads: Mooncake, Azure LLM, BurstGPT, the JSONL of load tools, and recordings of a real vLLM server.

Every reader gives `TraceRow`s; what is wrong with a line is said with file, line and field. Formats, as their publishers
describe them:

* Mooncake (kvcache-ai/Mooncake, FAST'25 traces): `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`,
  each id a block of 512 tokens. NVIDIA's dialect also has `session_id`, `delay` (milliseconds after the last answer) and the
  names `input_tokens`, `output_tokens`, `created_time`, `delay_ms`.
* Azure LLM inference traces (2023, 2024): CSV `TIMESTAMP,ContextTokens,GeneratedTokens`.
* BurstGPT: CSV `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, seconds; an answer of 0 tokens is a
  failure in the recording and is left out.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from windtunnel.core.units import MS, S
from windtunnel.sim.lengths import LIMIT
from windtunnel.sim.scenario import ScenarioError, WorkloadSpec
from windtunnel.sim.tokens import random_tokens
from windtunnel.sim.workload import Question, Writer

MOONCAKE_BLOCK = 512
_SHARED_PREFIX = -1
_PREFIX_LIMIT = 1 << 16
MAX_LINE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `at_ns` None: when the session's turn before it has been answered, plus `delay_ns`."""

    at_ns: int | None
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    session: str | None = None
    delay_ns: int = 0
    shared_prefix_tokens: int = 0
    """So many tokens at the beginning are the same in all rows that have a shared prefix."""


class _Line:
    """One line while it is read: takes fields out of it and says what is wrong with them."""

    def __init__(self, path: Path, number: int, values: Mapping[str, Any]) -> None:
        self._where = f"{path}: line {number}"
        self._values = values

    def wrong(self, text: str) -> ScenarioError:
        return ScenarioError(f"{self._where}: {text}")

    def find(self, *names: str) -> tuple[str, Any] | None:
        """The first of these fields that is there."""
        return next(((name, self._values[name]) for name in names if self._values.get(name) is not None), None)

    def integer(self, *names: str, least: int = 0) -> int:
        number = self.number(*names)
        if number != int(number) or not least <= number <= LIMIT:
            raise self.wrong(f"{names[0]} is {number:g}: must be a whole number from {least} to {LIMIT}")
        return int(number)

    def number(self, *names: str) -> float:
        found = self.find(*names)
        if found is None:
            raise self.wrong(f"{' or '.join(names)} is missing")
        name, value = found
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self.wrong(f"{name} is {value!r}: must be a number") from None
        if isinstance(value, bool) or not 0 <= number < 1e18:
            raise self.wrong(f"{name} is {value!r}: must be a number from 0 on")
        return number

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise self.wrong(f"{name} is {str(value)[:60]!r}: must be a list of whole numbers")
        return tuple(value)

    def text(self, *names: str) -> str | None:
        found = self.find(*names)
        return None if found is None else str(found[1])


def _jsonl(path: Path) -> Iterator[_Line]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if len(line) > MAX_LINE:
                raise ScenarioError(f"{path}: line {number}: longer than {MAX_LINE} bytes")
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise ScenarioError(f"{path}: line {number}: not JSON: {error}") from None
            if not isinstance(values, dict):
                raise ScenarioError(f"{path}: line {number}: must be a JSON object, not {type(values).__name__}")
            yield _Line(path, number, values)


def _csv(path: Path, *needed: str) -> Iterator[_Line]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise ScenarioError(f"{path}: line 1: no column {', '.join(missing)}; it has {', '.join(reader.fieldnames or ())}")
        for values in reader:
            yield _Line(path, reader.line_num, values)


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    for line in _jsonl(path):
        prompt = line.integer("input_length", "input_tokens", least=1)
        blocks = line.integers("hash_ids")
        if len(blocks) * MOONCAKE_BLOCK >= prompt + MOONCAKE_BLOCK:
            raise line.wrong(f"hash_ids has {len(blocks)} blocks of {MOONCAKE_BLOCK} tokens, but input_length is {prompt}")
        timed = line.find("timestamp", "created_time")
        session = line.text("session_id")
        if timed is None and session is None:
            raise line.wrong("timestamp is missing (only a later turn of a session_id has none)")
        at_ns = None if timed is None else round(line.number("timestamp", "created_time") * MS)
        delay = round(line.number("delay", "delay_ms") * MS) if line.find("delay", "delay_ms") else 0
        output = max(1, line.integer("output_length", "output_tokens"))
        yield TraceRow(at_ns, prompt, output, blocks, session, delay)


def read_azure(path: Path) -> Iterator[TraceRow]:
    first_ns: int | None = None
    for line in _csv(path, "TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        at_ns = _azure_time_ns(line)
        first_ns = at_ns if first_ns is None else first_ns
        output = max(1, line.integer("GeneratedTokens"))
        yield TraceRow(max(0, at_ns - first_ns), line.integer("ContextTokens", least=1), output)


def _azure_time_ns(line: _Line) -> int:
    """`2023-11-16 18:17:03.9799600` (2023) or with an offset from UTC (2024)."""
    text = line.text("TIMESTAMP") or ""
    clock, _, fraction = text.partition(".")
    digits = fraction.partition("+")[0]
    try:
        seconds = int((datetime.fromisoformat(clock.partition("+")[0]) - datetime(1970, 1, 1)).total_seconds())
        return seconds * S + (round(int(digits) * 10 ** (9 - len(digits))) if digits else 0)
    except ValueError:
        raise line.wrong(f"TIMESTAMP is {text!r}: must be like 2023-11-16 18:17:03.9799600") from None


def read_burstgpt(path: Path) -> Iterator[TraceRow]:
    for line in _csv(path, "Timestamp", "Request tokens", "Response tokens"):
        output = line.integer("Response tokens")
        prompt = line.integer("Request tokens")
        if output and prompt:
            yield TraceRow(round(line.number("Timestamp") * S), prompt, output, (), line.text("Session ID"))


_PROMPT_COUNTS = ("prompt_tokens_count", "prompt_tokens", "prompt_len", "input_length", "input_tokens", "input_sequence_length")
_OUTPUT_COUNTS = (
    "output_tokens_count", "output_tokens", "output_len", "output_length", "max_tokens", "output_sequence_length",
)  # fmt: skip
_TEXTS = ("prompt", "text", "text_input", "input")
_CHARACTERS_PER_TOKEN = 4


def read_loadtool(path: Path) -> Iterator[TraceRow]:
    """Prompts of guidellm, vLLM bench (`custom`) and aiperf (`single_turn`): a text or a count, and perhaps a time in ms.

    A text counts one token for four characters. Output 0 stands for "not given": the scenario's `output_tokens` then counts.
    """
    for line in _jsonl(path):
        if line.find(*_PROMPT_COUNTS):
            prompt = line.integer(*_PROMPT_COUNTS, least=1)
        else:
            text = line.text(*_TEXTS)
            if not text:
                raise line.wrong(f"no prompt: none of {', '.join((*_PROMPT_COUNTS, *_TEXTS))}")
            prompt = max(1, len(text) // _CHARACTERS_PER_TOKEN)
        output = line.integer(*_OUTPUT_COUNTS, least=1) if line.find(*_OUTPUT_COUNTS) else 0
        timed = line.find("timestamp")
        at_ns = None if timed is None else round(line.number("timestamp") * MS)
        yield TraceRow(at_ns, prompt, output, (), line.text("session_id"))


def read_golden(path: Path) -> Iterator[TraceRow]:
    """Recordings of a real server: passes, one after another; here each begins a second after the last arrival before it."""
    base_ns = last_ns = 0
    current: float | None = None
    for line in _jsonl(path):
        number = line.number("pass")
        if current is not None and number != current:
            base_ns = last_ns + S
        current = number
        at_ns = base_ns + round(line.number("start_s") * S)
        last_ns = max(last_ns, at_ns)
        shared = line.integer("shared_prefix_tokens") if line.find("shared_prefix_tokens") else 0
        prompt, output = line.integer("prompt_tokens", least=1), line.integer("output_tokens", least=1)
        yield TraceRow(at_ns, prompt, output, shared_prefix_tokens=min(shared, prompt))


READERS: Mapping[str, Callable[[Path], Iterator[TraceRow]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "golden": read_golden,
    "loadtool": read_loadtool,
}


def detect(path: Path) -> str:
    """The format, told from the first line. Raises ScenarioError."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(MAX_LINE)
    if first.lstrip().startswith("{"):
        try:
            keys = json.loads(first).keys()
        except json.JSONDecodeError as error:
            raise ScenarioError(f"{path}: line 1: not JSON: {error}") from None
        if {"pass", "start_s"} <= keys:
            return "golden"
        return "mooncake" if "hash_ids" in keys or {"timestamp", "input_length", "output_length"} <= keys else "loadtool"
    columns = {column.strip() for column in first.split(",")}
    for name, wanted in {"azure": "ContextTokens", "burstgpt": "Request tokens"}.items():
        if wanted in columns:
            return name
    raise ScenarioError(f"{path}: line 1: no known trace format; name it with trace_format ({', '.join(READERS)})")


def read_trace(path: Path, name: str = "auto") -> list[TraceRow]:
    """All rows, checked. Raises ScenarioError that names file, line and field."""
    try:
        rows = list(READERS[detect(path) if name == "auto" else name](path))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from None
    if not rows:
        raise ScenarioError(f"{path}: no requests in it")
    return rows


class Replay:
    """A trace as a workload: timed rows at their times over `trace_speed`, untimed ones at `rate`, turns after answers."""

    def __init__(self, spec: WorkloadSpec, stream: Callable[[str], Random], until_ns: int) -> None:
        assert spec.trace is not None
        self._spec, self._until_ns = spec, until_ns
        self._writer = Writer(spec, stream)
        self._seed = stream("workload.blocks").getrandbits(64)
        self._contents = stream("workload.contents")
        self._lengths = stream("workload.lengths")
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._later: dict[str, list[TraceRow]] = {}
        self._timed: list[tuple[int, TraceRow]] = []
        self._sort_in(read_trace(Path(spec.trace), spec.trace_format), stream("workload.gaps"))

    def _sort_in(self, rows: list[TraceRow], gaps: Random) -> None:
        started: set[str] = set()
        untimed_ns = 0.0
        for row in rows:
            if row.at_ns is not None:
                self._timed.append((round(row.at_ns / self._spec.trace_speed), row))
            elif row.session in started:
                self._later.setdefault(str(row.session), []).append(row)
            else:
                untimed_ns += gaps.expovariate(self._spec.rate) * S
                self._timed.append((round(untimed_ns), row))
            if row.session is not None:
                started.add(row.session)
        self._timed.sort(key=lambda entry: entry[0])

    def arrivals(self) -> Iterator[tuple[int, Question]]:
        for at_ns, row in self._timed:
            if at_ns >= self._until_ns or self._writer.exhausted:
                return
            yield at_ns, self._question(row, 0)

    def after(self, question: Question, ended_ns: int, answer_tokens: int | None) -> tuple[int, Question] | None:
        waiting = self._later.get(question.session or "")
        if not waiting or self._writer.exhausted:
            return None
        row = waiting.pop(0)
        at_ns = ended_ns + round(row.delay_ns / self._spec.trace_speed)
        return None if at_ns >= self._until_ns else (at_ns, self._question(row, question.turn + 1))

    def _question(self, row: TraceRow, turn: int) -> Question:
        output = row.output_tokens or self._spec.output_tokens.draw(self._lengths)
        return Question(self._writer.next_number(), self._prompt(row), output, row.session, turn)

    def _prompt(self, row: TraceRow) -> tuple[int, ...]:
        """Equal block ids: equal tokens. What no block covers is new."""
        if row.shared_prefix_tokens:
            prefix = self._block(_SHARED_PREFIX, _PREFIX_LIMIT)[: row.shared_prefix_tokens]
            return prefix + random_tokens(self._contents, row.prompt_tokens - len(prefix))
        known = [token for block in row.block_ids for token in self._block(block, MOONCAKE_BLOCK)][: row.prompt_tokens]
        return (*known, *random_tokens(self._contents, row.prompt_tokens - len(known)))

    def _block(self, block: int, tokens: int) -> tuple[int, ...]:
        found = self._blocks.get(block)
        if found is None:
            found = self._blocks[block] = random_tokens(Random(f"{self._seed}/{block}"), tokens)
        return found
