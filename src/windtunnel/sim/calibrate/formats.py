"""Request traces of load tools, read into runs. Every error names the file, the line or request, and the field.

| format | file | what it lacks |
| --- | --- | --- |
| `windtunnel` | JSONL, a request a line, every chunk with its time (the recorded trace) | nothing |
| `vllm-bench` | `vllm bench serve --save-result --save-detailed`, one document a run | time of the last byte, cached tokens |
| `aiperf` | `profile_export.jsonl` of AIPerf 0.13 | the concurrency |
| `guidellm` | `benchmarks.json` of GuideLLM 0.8 | chunks between first and last (taken as even) |

Tokens, cached ones included, are the server's counts where it sends them.

GenAI-Perf's `profile_export.json` has no token counts, so nothing can be fitted to it; its successor AIPerf writes them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from windtunnel.sim.calibrate.measured import Measured, Run
from windtunnel.sim.lengths import LIMIT

MAX_FILE_BYTES = 1 << 30
MAX_TIME = 1e12
"""Of a duration in milliseconds (10^9 s) and of a point in time in seconds."""
MAX_CLIENTS = 1_000_000
MAX_OUTPUT_TOKENS = 1_000_000
"""Of one request: each becomes a chunk where the tool noted none."""
_SHOWN_CHARS = 100
_PASS = re.compile(r"[\w.-]{1,64}", re.ASCII)
_PASS_FORM = "at most 64 letters, digits, '_', '-' and '.'"
_NS_PER_UNIT = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}


class TraceError(ValueError):
    """A trace that cannot be read: where, which field, and the right form."""


class Row:
    """One JSON object and where it stands. `number` and its like raise TraceError for what is missing or wrong."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise TraceError(f"{where}: must be a JSON object, not {type(data).__name__}")
        self.where = where
        self.data = data

    def number(self, field: str, *, most: float = MAX_TIME) -> float:
        return _number(self.where, field, self._required(field), most=most)

    def whole(self, field: str, *, least: int = 0, most: int = LIMIT) -> int:
        value = _number(self.where, field, self._required(field), least, most)
        if value != int(value):
            raise TraceError(f"{self.where}: {field} is {value}: must be a whole number")
        return int(value)

    def part(self, field: str) -> "Row":
        return Row(f"{self.where}: {field}", self._required(field))

    def group(self) -> str:
        """Named by `pass`, which becomes part of a file's name."""
        told = self.data.get("pass")
        if told is None:
            return ""
        if isinstance(told, bool) or not isinstance(told, int | float | str) or not _PASS.fullmatch(str(told)):
            shown = repr(told)[:_SHOWN_CHARS]
            raise TraceError(f"{self.where}: pass is {shown}: must be a number or a name of {_PASS_FORM}")
        return f"pass {told}"

    def items(self, field: str) -> Sequence[Any]:
        value = self._required(field)
        if not isinstance(value, list):
            raise TraceError(f"{self.where}: {field} must be a list, not {type(value).__name__}")
        return value

    def _required(self, field: str) -> Any:
        if self.data.get(field) is None:
            raise TraceError(f"{self.where}: {field} is missing")
        return self.data[field]


def _number(where: str, field: str, value: Any, least: float = 0.0, most: float = MAX_TIME) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        shown, bound = repr(value)[:_SHOWN_CHARS], f"{most:.10g}"
        raise TraceError(f"{where}: {field} is {shown}: must be a number of {least:g} to {bound}")
    return float(value)


def _tokens(where: str, field: str, value: Any, most: int = MAX_OUTPUT_TOKENS) -> int:
    return int(_number(where, field, value, 1, most))


def read_runs(path: Path, kind: str = "auto", concurrency: int | None = None) -> list[Run]:
    """The runs of one file. `concurrency` for formats that do not carry it. Raises TraceError, OSError."""
    documents = read_rows(path)
    name = _detect(documents[0]) if kind == "auto" else kind
    runs = READERS[name](documents, concurrency)
    if not any(run.requests for run in runs):
        raise TraceError(f"{path.name}: holds no successful request")
    return runs


def read_rows(path: Path) -> list[Row]:
    """The whole file as one JSON document, or one a line; at least one. Raises TraceError, OSError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TraceError(f"{path.name}: larger than {MAX_FILE_BYTES} bytes")
    rows = _documents(path)
    if not rows:
        raise TraceError(f"{path.name}: is empty")
    return rows


def _documents(path: Path) -> list[Row]:
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return [_line(path.name, number, line) for number, line in lines]
    return [Row(path.name, document)]


def _line(name: str, number: int, line: str) -> Row:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{name} line {number}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise TraceError(f"{name} line {number}: is nested too deeply") from None
    except ValueError as error:
        raise TraceError(f"{name} line {number}: not JSON: {error}") from None
    return Row(f"{name} line {number}", document)


_MARKS = {"chunks": "windtunnel", "ttfts": "vllm-bench", "benchmarks": "guidellm", "metadata": "aiperf"}
"""A field that tells a format, tried in this order: GuideLLM has `metadata`, too."""


def _detect(first: Row) -> str:
    if "experiments" in first.data:
        raise TraceError(
            f"{first.where}: a GenAI-Perf profile has no token counts; measure with AIPerf and give its profile_export.jsonl"
        )
    for mark, name in _MARKS.items():
        if mark in first.data:
            return name
    raise TraceError(f"{first.where}: no known format has these fields; the first ones are {', '.join(list(first.data)[:6])}")


def _grouped(requests: Iterator[tuple[str, str, int | None, Measured]]) -> list[Run]:
    runs: dict[tuple[str, str, int | None], list[Measured]] = {}
    for group, load, concurrency, request in requests:
        runs.setdefault((group, load, concurrency), []).append(request)
    return [
        Run(f"{group} {load}".strip(), concurrency, requests, group) for (group, load, concurrency), requests in runs.items()
    ]


# windtunnel


def _windtunnel(rows: Sequence[Row], _concurrency: int | None) -> list[Run]:
    return _grouped(_windtunnel_request(row) for row in rows)


def _windtunnel_request(row: Row) -> tuple[str, str, int | None, Measured]:
    data = row.data
    closed = data.get("concurrency") is not None and data.get("poisson_rate_rps") is None
    concurrency = row.whole("concurrency", least=1, most=MAX_CLIENTS) if closed else None
    load = f"c={concurrency}" if closed else f"{data.get('poisson_rate_rps', '?')} rps"
    chunks = tuple(_chunk(row, at, item) for at, item in enumerate(row.items("chunks")))
    _check_chunks(row, chunks)
    cached = row.whole("cached_tokens") if data.get("cached_tokens") is not None else 0
    prompt = row.whole("prompt_tokens", least=1)
    if cached >= prompt:
        raise TraceError(f"{row.where}: cached_tokens is {cached}: must be below prompt_tokens {prompt}")
    request = Measured(
        row.number("start_s"),
        prompt,
        row.whole("output_tokens", least=1, most=MAX_OUTPUT_TOKENS),
        chunks,
        row.number("e2e_ms"),
        cached,
        row.number("headers_ms") if data.get("headers_ms") is not None else None,
    )
    return row.group(), load, concurrency, request


def _chunk(row: Row, at: int, item: Any) -> tuple[float, int]:
    if not isinstance(item, list) or len(item) != 2:
        raise TraceError(f"{row.where}: chunks[{at}] is {item!r}: must be [milliseconds, tokens so far]")
    return _number(row.where, f"chunks[{at}][0]", item[0]), _tokens(row.where, f"chunks[{at}][1]", item[1])


def _check_chunks(row: Row, chunks: Sequence[tuple[float, int]]) -> None:
    if not chunks:
        raise TraceError(f"{row.where}: chunks is empty: a request without output cannot be fitted")
    for at, (before, after) in enumerate(pairwise(chunks), 1):
        if after[0] < before[0] or after[1] <= before[1]:
            raise TraceError(f"{row.where}: chunks[{at}] is {list(after)}: times must not fall and tokens must rise")


# vllm bench serve


def _vllm_bench(rows: Sequence[Row], concurrency: int | None) -> list[Run]:
    return [_vllm_bench_run(row, concurrency) for row in rows]


def _vllm_bench_run(row: Row, concurrency: int | None) -> Run:
    columns = {name: row.items(name) for name in ("input_lens", "output_lens", "ttfts", "itls")}
    starts = row.items("start_times") if row.data.get("start_times") else [1e-6 * at for at in range(len(columns["ttfts"]))]
    counts = {name: len(column) for name, column in {**columns, "start_times": starts}.items()}
    if len(set(counts.values())) != 1:
        raise TraceError(f"{row.where}: lists differ in length: {counts}")
    errors = row.items("errors") if row.data.get("errors") else []
    requests = []
    for at, (prompt, output, ttft, itls) in enumerate(zip(*columns.values(), strict=True)):
        if at < len(errors) and errors[at]:
            continue
        requests.append(
            _vllm_bench_request(Row(f"{row.where}: request {at}", {"itls": itls}), starts[at], prompt, output, ttft)
        )
    given = concurrency
    if given is None and row.data.get("max_concurrency"):
        given = row.whole("max_concurrency", least=1, most=MAX_CLIENTS)
    return Run(f"c={given}" if given else "open loop", given, requests)


def _vllm_bench_request(row: Row, start: Any, prompt: Any, output: Any, ttft: Any) -> Measured:
    gaps_s = [_number(row.where, f"itls[{at}]", gap) for at, gap in enumerate(row.items("itls"))]
    times_ms = [1e3 * at for at in accumulate([_number(row.where, "ttfts", ttft), *gaps_s])]
    tokens = _tokens(row.where, "output_lens", output)
    return Measured(
        _number(row.where, "start_times", start),
        _tokens(row.where, "input_lens", prompt, LIMIT),
        tokens,
        _spread(times_ms, tokens),
        times_ms[-1],
    )


def _spread(times_ms: Sequence[float], tokens: int) -> tuple[tuple[float, int], ...]:
    """Chunks whose sizes nobody noted: as even as whole tokens can be, at least one each."""
    count = min(len(times_ms), tokens)
    kept = [*times_ms[: count - 1], times_ms[-1]]
    return tuple((at_ms, (number * tokens) // count) for number, at_ms in enumerate(kept, 1))


# AIPerf


def _aiperf(rows: Sequence[Row], concurrency: int | None) -> list[Run]:
    if concurrency is None:
        raise TraceError(f"{rows[0].where}: an AIPerf export does not say its concurrency: give --concurrency")
    good = (
        row for row in rows if not row.data.get("error") and row.part("metadata").data.get("benchmark_phase") == "profiling"
    )
    return [Run(f"c={concurrency}", concurrency, [_aiperf_request(row) for row in good])]


def _aiperf_request(row: Row) -> Measured:
    metrics = row.part("metrics")
    first_ms = _aiperf_ms(metrics, "time_to_first_token")
    gaps = metrics.part("inter_chunk_latency")
    scale = _unit(gaps)
    gaps_ms = [scale * _number(gaps.where, f"value[{at}]", gap) for at, gap in enumerate(gaps.items("value"))]
    tokens = _aiperf_tokens(metrics, "usage_completion_tokens", "output_sequence_length", MAX_OUTPUT_TOKENS)
    prompt = _aiperf_tokens(metrics, "usage_prompt_tokens", "input_sequence_length", LIMIT)
    cached = metrics.part(_AIPERF_CACHED).whole("value") if metrics.data.get(_AIPERF_CACHED) else 0
    times_ms = list(accumulate([first_ms, *gaps_ms]))
    return Measured(
        row.part("metadata").number("request_start_ns", most=1e9 * MAX_TIME) / 1e9,
        prompt,
        tokens,
        _spread(times_ms, tokens),
        max(_aiperf_ms(metrics, "request_latency"), times_ms[-1]),
        min(cached, prompt - 1),
    )


_AIPERF_CACHED = "usage_prompt_cache_read_tokens"


def _aiperf_tokens(metrics: Row, counted: str, estimated: str, most: int) -> int:
    """The server's count, where it sent one: AIPerf's own comes from its tokenizer, without the chat template."""
    return metrics.part(counted if metrics.data.get(counted) else estimated).whole("value", least=1, most=most)


def _aiperf_ms(metrics: Row, name: str) -> float:
    metric = metrics.part(name)
    return _unit(metric) * metric.number("value")


def _unit(metric: Row) -> float:
    unit = metric.data.get("unit")
    if unit not in _NS_PER_UNIT:
        raise TraceError(f"{metric.where}: unit is {unit!r}: must be one of {', '.join(_NS_PER_UNIT)}")
    return _NS_PER_UNIT[unit]


# GuideLLM


def _guidellm(rows: Sequence[Row], concurrency: int | None) -> list[Run]:
    runs = []
    for number, document in enumerate(rows[0].items("benchmarks")):
        benchmark = Row(f"{rows[0].where}: benchmarks[{number}]", document)
        streams = concurrency if concurrency is not None else _streams(benchmark)
        requests = benchmark.part("requests")
        found = [
            _guidellm_request(Row(f"{requests.where}: successful[{at}]", item))
            for at, item in enumerate(requests.items("successful"))
        ]
        runs.append(Run(f"c={streams}" if streams else f"benchmark {number}", streams, found))
    return runs


def _streams(benchmark: Row) -> int | None:
    """Clients of a closed loop; None for a rate."""
    for section in ("config", "args"):
        strategy = (benchmark.data.get(section) or {}).get("strategy") or {}
        if strategy.get("type_") == "synchronous":
            return 1
        if strategy.get("type_") == "concurrent":
            return Row(f"{benchmark.where}: {section}.strategy", strategy).whole("streams", least=1, most=MAX_CLIENTS)
    return None


def _guidellm_request(row: Row) -> Measured:
    first_ms, tokens = row.number("time_to_first_token_ms"), row.whole("output_tokens", least=1, most=MAX_OUTPUT_TOKENS)
    gap_ms = row.number("inter_token_latency_ms") if tokens > 1 else 0.0
    times_ms = [first_ms + gap_ms * at for at in range(tokens)]
    prompt = row.whole("prompt_tokens", least=1)
    cached = row.whole("cached_tokens") if row.data.get("cached_tokens") is not None else 0
    return Measured(
        row.number("request_start_time"),
        prompt,
        tokens,
        _spread(times_ms, tokens),
        max(1e3 * row.number("request_latency"), times_ms[-1]),
        min(cached, prompt - 1),
    )


READERS: Mapping[str, Callable[[Sequence[Row], int | None], list[Run]]] = {
    "windtunnel": _windtunnel,
    "vllm-bench": _vllm_bench,
    "aiperf": _aiperf,
    "guidellm": _guidellm,
}
