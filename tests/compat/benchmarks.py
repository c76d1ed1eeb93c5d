"""Benchmark clients against one server that was told its times: what each reports is compared with that."""

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.compat.cases import WORKS
from tests.compat.modes import NOT_HERE, Mode, Trial
from tests.compat.site import ANSWER_S, GENERATING, POLL_S, Worker, running, worker
from windtunnel.wire.builtin_files import tokenizer_files

TTFT_MS, ITL_MS = 1000, 100
WITHIN = 0.25
"""Of what the server was told: a benchmark's own event loop is in its figures."""
OUTPUT_TOKENS = 10
RUN_S = 300
TOLD = ("--ttft", f"{TTFT_MS}ms", "--itl", f"{ITL_MS}ms")
TOLD_OF = {"vllm": TOLD, "sglang": (*TOLD, "--enable-metrics")}


@dataclass(frozen=True)
class Report:
    """What a benchmark says of each request that was answered."""

    ttft_ms: Sequence[float]
    itl_ms: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    cancelled: int = 0


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    report: Report
    server: Worker
    empty: bool

    @property
    def left(self) -> int:
        """Requests whose client had gone before the answer was whole."""
        return sum(line.gone and not line.answered for line in self.server.lines)

    def total(self, name: str) -> int:
        return round(sum(self.server.live.gauge(f"{engine}:{name}_total") for engine in ("vllm", "sglang")))


@dataclass(frozen=True)
class Row:
    name: str
    cell: Callable[[Outcome], str]
    cancelling: bool = True
    """It means something where requests are cancelled on purpose."""


def _ends(outcome: Outcome) -> str:
    answered = len(outcome.report.ttft_ms) + outcome.report.cancelled
    asked = outcome.server.asked
    return WORKS if (outcome.exit_code, answered) == (0, asked) else f"exit code {outcome.exit_code}, {answered} of {asked}"


def _median(told: Sequence[float], wanted_ms: float) -> str:
    found = statistics.median(told) if told else 0
    return WORKS if abs(found - wanted_ms) <= WITHIN * wanted_ms else f"{found:.0f} ms"


def _output(outcome: Outcome) -> str:
    told = sorted(set(outcome.report.output_tokens))
    return WORKS if told == [OUTPUT_TOKENS] else f"{', '.join(map(str, told))} for {OUTPUT_TOKENS}"


def _prompt(outcome: Outcome) -> str:
    """The difference for each request."""
    missing = (outcome.total("prompt_tokens") - sum(outcome.report.prompt_tokens)) / max(outcome.server.asked, 1)
    return WORKS if not missing else f"{missing:g} fewer"


def _members(outcome: Outcome) -> str:
    return ", ".join(f"`{name}`" for name in sorted({name for one in outcome.server.posts for name in one.body}))


def _visits(outcome: Outcome) -> str:
    return ", ".join(f"`{path}`" for path in sorted(outcome.server.visits - set(GENERATING))) or "nothing"


def _cancelled(outcome: Outcome) -> str:
    told, seen = outcome.report.cancelled, outcome.left
    if not told:
        return NOT_HERE if not seen else f"none, the server saw {seen}"
    return WORKS if told == seen else f"{told}, the server saw {seen}"


ROWS = (
    Row("ends with exit code 0 and reports every request that reached the server", _ends),
    Row(
        f"median time to first token: the server's {TTFT_MS} ms, within {WITHIN:.0%}",
        lambda outcome: _median(outcome.report.ttft_ms, TTFT_MS),
    ),
    Row(
        f"median time between tokens: the server's {ITL_MS} ms, within {WITHIN:.0%}",
        lambda outcome: _median(outcome.report.itl_ms, ITL_MS),
    ),
    Row("output tokens of each request: as many as were asked for", _output),
    Row("prompt tokens of each request: as the server counts them", _prompt, cancelling=False),
    Row("requests cancelled on purpose: as many as the server saw leaving", _cancelled),
    Row("the server is empty afterwards", lambda outcome: WORKS if outcome.empty else "no"),
    Row("members of a body", _members),
    Row("also asked for", _visits),
)


@dataclass(frozen=True)
class Benchmark(Trial):
    """`read` finds the report in the folder that the program wrote to."""

    read: Callable[[Path], Report]
    rows: Sequence[str] = field(default=tuple(row.name for row in ROWS))

    async def run(self, mode: Mode, program: str) -> dict[str, str]:
        outcome = await self._outcome(mode, program)
        cancelling = bool(outcome.report.cancelled)
        return {row.name: row.cell(outcome) if row.cancelling or not cancelling else NOT_HERE for row in ROWS}

    async def _outcome(self, mode: Mode, program: str) -> Outcome:
        with tempfile.TemporaryDirectory() as name:
            folder, tokenizer = Path(name), Path(name) / "tokenizer"
            tokenizer.mkdir()
            for file, data in tokenizer_files().items():
                (tokenizer / file).write_bytes(data)
            async with worker(mode, "worker", mode.plain_flags) as server:
                places = {"url0": server.live.url, "tokenizer": tokenizer, "folder": folder}
                async with running(mode, program, places, folder) as process, asyncio.timeout(RUN_S):
                    exit_code = await process.wait()
                report = self.read(folder) if exit_code == 0 else Report((), (), (), ())
                return Outcome(exit_code, report, server, await _emptied(server))


async def _emptied(server: Worker) -> bool:
    for _ in range(round(ANSWER_S / POLL_S)):
        if server.empty():
            return True
        await asyncio.sleep(POLL_S)
    return False
