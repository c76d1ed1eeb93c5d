"""A prompt of 100,000 tokens: how long until it is tokenised, hashed and matched, and what it costs the other streams.

100 streams run with 20 ms between tokens, started at random moments. Short windows follow each other round after round: nothing
else runs, long prompts arrive as text, long prompts arrive as token ids; in the latter two about twice a second, each twice.
So the machine's own noise hits all three alike, and the figure is the difference between windows of one round (`*_over_alone`,
the median over the rounds). A stream's schedule is its own best alignment, as in `bench.lateness`. What a long prompt can add
in CPU time, which no neighbour changes, is `bench.loop_holds`.

The time of a long prompt is that of a whole request for one token; beside the milliseconds stands its ratio to a loop of a
million additions in the same interpreter, which a busy machine slows down alike.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from bench.harness import CLIENT_CORE, connect, drain, percentile, pin, server, start_streams
from windtunnel.core.tokenizer import BuiltinTokenizer

ITL_S = 0.020
STREAMS = 100
PROMPT_TOKENS = 100_000
ROUNDS = 8
WINDOW_S = 1.5
GUARD_S = 0.3
"""Behind each window: its last prompt is done, and what it left behind, too."""
START_S = 1.0
PAUSE_S = 0.4
_BODIES_A_WINDOW = 2
"""Enough: each is sent twice."""
_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog's",
    "tail,",
    "and",
    "then",
    "42",
    "Numbers.",
    "hello",
    "ice-cold",
)
_FLAGS = (
    "--itl", "20ms", "--max-num-seqs", "2000", "--max-model-len", "131072", "--num-gpu-blocks-override", "65536",
)  # fmt: skip


class Window(NamedTuple):
    kind: str
    start_s: float
    end_s: float


def run() -> dict[str, float]:
    pin(CLIENT_CORE)
    count = ROUNDS * _BODIES_A_WINDOW
    bodies = {"alone": [], "text": text_bodies(count), "ids": id_bodies(count)}
    with server(*_FLAGS) as (port, _):
        rounds = Rounds(port, bodies)
        late = _lateness(port, rounds)
    results = {f"p99_ms_{kind}": _p99_ms([one for per_round in late[kind] for one in per_round]) for kind in bodies}
    for kind in ("text", "ids"):
        over = [_p99_ms(there) - _p99_ms(alone) for there, alone in zip(late[kind], late["alone"], strict=True)]
        results[f"p99_ms_over_alone_{kind}"] = round(median(over), 3)
        results |= {f"{kind}_{name}": value for name, value in _prompt_times(rounds.took_s[kind]).items()}
    return results


def _p99_ms(late_s: Sequence[float]) -> float:
    return round(1e3 * percentile(late_s, 0.99), 3)


def _prompt_times(took_s: Sequence[float]) -> dict[str, float]:
    new, repeated = percentile(took_s[0::2], 0.5), percentile(took_s[1::2], 0.5)
    return {
        "new_ms": round(1e3 * new, 1),
        "repeated_ms": round(1e3 * repeated, 1),
        "repeated_ratio": round(repeated / _million_additions_s(), 2),
        "prompts": len(took_s),
    }


def _million_additions_s() -> float:
    """Best of five: what the interpreter can do when it is let."""
    best = float("inf")
    for _ in range(5):
        started, total = time.perf_counter(), 0
        for number in range(1_000_000):
            total += number
        best = min(best, time.perf_counter() - started)
    return best


def _prose(chance: random.Random, tokenizer: BuiltinTokenizer) -> str:
    text = " ".join(chance.choices(_WORDS, k=PROMPT_TOKENS))
    return text[: len(text) * PROMPT_TOKENS // len(tokenizer.encode(text))]


def text_bodies(count: int = 8) -> list[bytes]:
    tokenizer = BuiltinTokenizer()
    return [_body(_prose(random.Random(number), tokenizer)) for number in range(count)]


def id_bodies(count: int = 8) -> list[bytes]:
    return [_body(random.Random(number).choices(range(1000, 9000), k=PROMPT_TOKENS)) for number in range(count)]


def _body(prompt: str | list[int]) -> bytes:
    return json.dumps({"model": "bench-model", "prompt": prompt, "max_tokens": 1}).encode()


class Sender:
    """One client of long prompts: each body twice, one request at a time."""

    def __init__(self, port: int, bodies: Sequence[bytes]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._bodies = (body for body in bodies for _ in range(2))

    def send(self, until_s: float) -> Iterator[float]:
        """What each request took, in seconds; none begins after `until_s`."""
        for body in self._bodies:
            started = time.perf_counter()
            self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
            yield time.perf_counter() - started
            if time.perf_counter() + PAUSE_S > until_s:
                return
            time.sleep(PAUSE_S)


class Rounds(threading.Thread):
    """Window after window, each kind once in a round."""

    def __init__(self, port: int, bodies: dict[str, list[bytes]]) -> None:
        super().__init__(daemon=True)
        self.windows: list[Window] = []
        self.took_s: dict[str, list[float]] = {kind: [] for kind in bodies}
        self._senders = {kind: Sender(port, made) for kind, made in bodies.items()}

    def run(self) -> None:
        for kind in (kind for _ in range(ROUNDS) for kind in self._senders):
            start_s = time.perf_counter()
            self.took_s[kind] += self._senders[kind].send(start_s + WINDOW_S)
            time.sleep(max(0.0, start_s + WINDOW_S - time.perf_counter()))
            self.windows.append(Window(kind, start_s, time.perf_counter()))
            time.sleep(GUARD_S)


def _lateness(port: int, rounds: Rounds) -> dict[str, list[list[float]]]:
    """For each kind and round how late the frames were, in seconds, that were due in its window."""
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    sockets = connect(port, STREAMS)
    start_streams(sockets, _tokens_needed(), START_S)
    rounds.start()
    for number, at, data in drain(sockets, b"0\r\n\r\n"):
        arrivals[number] += [at] * data.count(b"data: {")
        if not rounds.is_alive():
            break
    assert not rounds.is_alive(), "the streams ended before the last window: the machine is too slow for this schedule"
    for one in sockets:
        one.close()
    frames = sorted(frame for times in arrivals for frame in _frames(times))
    late: dict[str, list[list[float]]] = {}
    for window in rounds.windows:
        late.setdefault(window.kind, []).append([by for due, by in frames if window.start_s <= due < window.end_s])
    return late


def _tokens_needed() -> int:
    """As long as all windows take, and as long again: a window waits for its last prompt."""
    return int(2 * (START_S + 3 * ROUNDS * (WINDOW_S + GUARD_S)) / ITL_S)


def _frames(times: Sequence[float]) -> Iterator[tuple[float, float]]:
    """(when it was due, how late it was) for each frame of a stream."""
    start = min(at - number * ITL_S for number, at in enumerate(times))
    return ((start + number * ITL_S, at - number * ITL_S - start) for number, at in enumerate(times))


if __name__ == "__main__":
    print(json.dumps(run()))
