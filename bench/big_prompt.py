"""A prompt of 100,000 tokens: how long until it is tokenised, hashed and matched, and what it costs the other streams.

100 streams run with 20 ms between tokens while a long prompt arrives about twice a second, new and repeated in turn. A stream's
schedule is its own best alignment, as in `bench.lateness`. Other work on the machine makes frames late too, hence the figure
`hold`: how much CPU time the reading thread uses before another thread that wants to run gets its turn. The time of a long
prompt is that of a whole request for one token; beside the milliseconds stands its ratio to a loop of a million additions in
the same interpreter, which a busy machine slows down alike.
"""

import http.client
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from bench.harness import CLIENT_CORE, connect, drain, percentile, pin, server, stream_request
from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.serve.config import GenerationConfig
from windtunnel.serve.planning import SWITCH_INTERVAL_S, PrefixReader, prepare
from windtunnel.serve.sources import SourceMaker
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.vllm import completions

ITL_S = 0.020
TOKENS = 200
STREAMS = 100
PROMPT_TOKENS = 100_000
PAUSE_S = 0.4
_NAP_S = 0.0002
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


def run() -> dict[str, float]:
    pin(CLIENT_CORE)
    results: dict[str, float] = {}
    with server(*_FLAGS) as (port, _):
        bodies = {"text": text_bodies(), "ids": id_bodies()}
        results["p99_ms_alone"] = _lateness(port, None)[0]
        for kind, made in bodies.items():
            sender = Sender(port, made)
            results[f"p99_ms_beside_{kind}"], results[f"max_ms_beside_{kind}"] = _lateness(port, sender)
            reference = _million_additions_s()
            new, repeated = percentile(sender.took_s[0::2], 0.5), percentile(sender.took_s[1::2], 0.5)
            results[f"{kind}_new_ms"], results[f"{kind}_repeated_ms"] = round(1e3 * new, 1), round(1e3 * repeated, 1)
            results[f"{kind}_repeated_ratio"] = round(repeated / reference, 2)
            results[f"{kind}_prompts"] = len(sender.took_s)
            results[f"{kind}_hold_p99_ms"], results[f"{kind}_hold_max_ms"] = _holds_ms(made)
    return results


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


def _holds_ms(bodies: Sequence[bytes]) -> tuple[float, float]:
    """p99 and maximum, over all turns that this thread asks for while another one reads the bodies as the server does."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tokenizer = BuiltinTokenizer()
    env = ServerEnv(("bench-model",), tokenizer, 131072, lambda: "0" * 16, lambda: 0)
    prefix = PrefixReader(BlockHasher("sha256", 16), lambda _hashes: ())
    identity = SourceMaker(GenerationConfig(), tokenizer).identity

    def read() -> None:
        for body in bodies:
            prepare(completions.plan(body, {"content-type": "application/json"}, env), prefix, identity)

    reader = threading.Thread(target=read)
    reader.start()
    holds = []
    while reader.is_alive():
        before_ns = time.process_time_ns()
        time.sleep(_NAP_S)
        holds.append(1e3 * max(0.0, (time.process_time_ns() - before_ns) / 1e9 - _NAP_S))
    return round(percentile(holds, 0.99), 3), round(max(holds), 3)


class Sender(threading.Thread):
    """Sends each body twice, one request at a time, until told to stop."""

    def __init__(self, port: int, bodies: Sequence[bytes]) -> None:
        super().__init__(daemon=True)
        self.took_s: list[float] = []
        self._port = port
        self._bodies = bodies
        self._stop_asked = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        for body in (body for body in self._bodies for _ in range(2)):
            if self._stop_asked.wait(PAUSE_S):
                break
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
            self.took_s.append(time.perf_counter() - started)

    def end(self) -> None:
        self._stop_asked.set()
        self.join()


def _lateness(port: int, sender: Sender | None) -> tuple[float, float]:
    """p99 and maximum over all frames of all streams, in milliseconds."""
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    sockets = connect(port, STREAMS)
    for number in random.Random(1).sample(range(STREAMS), STREAMS):
        sockets[number].sendall(stream_request(TOKENS, number))
    if sender is not None:
        sender.start()
    for number, at, data in drain(sockets, b"0\r\n\r\n"):
        arrivals[number] += [at] * data.count(b"data: {")
    if sender is not None:
        sender.end()
    late_ms = [1e3 * late for times in arrivals for late in _late(times)]
    return round(percentile(late_ms, 0.99), 3), round(max(late_ms), 3)


def _late(times: Sequence[float]) -> Iterator[float]:
    start = min(at - number * ITL_S for number, at in enumerate(times))
    return (at - number * ITL_S - start for number, at in enumerate(times))


if __name__ == "__main__":
    print(json.dumps(run()))
