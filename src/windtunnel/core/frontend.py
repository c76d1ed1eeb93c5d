"""The API server in front of an engine, as one event loop that takes turns. Sans-IO: values and times in, values and times out.

In one turn the loop gives every request that is on its way in one slice of its work, then takes every batch of outputs that
the engine has finished and writes one chunk for each sequence. Two things follow that measurements of vLLM 0.32 show (the
recorded trace, concurrency 16): while the loop is idle, a request costs its own work only, but while chunks keep the loop busy
it waits a whole burst of chunks for each of its turns; and where the engine is faster than the loop, tokens of several steps
leave as one chunk.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from windtunnel.core.pacing import Draws
from windtunnel.core.profile import FrontendCosts, Noise, NoiseStream


class Submission(NamedTuple):
    """A request that leaves the front end for the engine."""

    key: str
    at_ns: int


class Chunk(NamedTuple):
    """Outputs of one sequence, written to its client at one time."""

    key: str
    outputs: int
    at_ns: int
    last: bool


class Turn(NamedTuple):
    """What came of one turn of the loop."""

    submissions: list[Submission]
    chunks: list[Chunk]
    request_work_ns: float
    """On requests, their way to the engine included, on an idle machine."""
    chunk_work_ns: float
    """On outputs, on an idle machine."""


class _Incoming:
    __slots__ = ("key", "slice_ns", "turns_left")

    def __init__(self, key: str, slice_ns: float, turns: int) -> None:
        self.key = key
        self.slice_ns = slice_ns
        self.turns_left = turns


class Frontend:
    """Owns what is between the clients and one engine. `now_ns` never goes back."""

    def __init__(self, costs: FrontendCosts, noise: Noise, draws: Draws) -> None:
        self._costs = costs
        self._noise = NoiseStream(noise, draws)
        self._arrivals: deque[tuple[int, _Incoming]] = deque()
        self._incoming: list[_Incoming] = []
        self._batches: deque[tuple[int, Sequence[tuple[str, bool]]]] = deque()
        self._free_ns = 0

    def arrive(self, key: str, prompt_tokens: int, at_ns: int) -> None:
        costs = self._costs
        work_ns = costs.request_ns + costs.prompt_token_ns * prompt_tokens
        self._arrivals.append((at_ns, _Incoming(key, work_ns / costs.turns, costs.turns)))

    def take_outputs(self, outputs: Sequence[tuple[str, bool]], at_ns: int) -> None:
        """One output for each (key, is its last) from a step that ended at `at_ns`."""
        self._batches.append((at_ns, outputs))

    def next_event_at(self) -> int | None:
        """When the next turn starts; None while there is nothing to do."""
        if self._incoming:
            return self._free_ns
        heads = [queue[0][0] for queue in (self._arrivals, self._batches) if queue]
        return max(self._free_ns, min(heads)) if heads else None

    def turn(self, stretch: float = 1.0) -> Turn:
        """Run the turn that `next_event_at` announced. Its results may lie later than its start.

        All work takes `stretch` times as long as on an idle machine.
        """
        start_ns = self.next_event_at()
        assert start_ns is not None, "the front end has nothing to do"
        clock_ns, submissions = self._serve_incoming(start_ns, stretch)
        request_work_ns = (clock_ns - start_ns) / stretch + self._costs.handover_ns * len(submissions)
        writing_ns = clock_ns
        outputs, last = self._merge(start_ns)
        chunks = []
        if outputs:
            clock_ns += self._costs.step_ns * stretch
        for key, count in outputs.items():
            clock_ns += self._costs.chunk_ns * stretch
            chunks.append(Chunk(key, count, round(clock_ns), key in last))
            if key in last:
                clock_ns += self._costs.chunk_ns * ENDING_WRITES * stretch
        self._free_ns = round(clock_ns)
        return Turn(submissions, chunks, request_work_ns, (clock_ns - writing_ns) / stretch)

    def _serve_incoming(self, start_ns: int, stretch: float) -> tuple[float, list[Submission]]:
        while self._arrivals and self._arrivals[0][0] <= start_ns:
            self._incoming.append(self._arrivals.popleft()[1])
        clock_ns = float(start_ns)
        submissions = []
        for one in self._incoming:
            clock_ns += one.slice_ns * stretch
            one.turns_left -= 1
            if not one.turns_left:
                on_its_way_ns = max(0.0, self._costs.handover_ns + self._noise.draw())
                submissions.append(Submission(one.key, round(clock_ns + on_its_way_ns * stretch)))
        self._incoming = [one for one in self._incoming if one.turns_left]
        return clock_ns, submissions

    def _merge(self, start_ns: int) -> tuple[dict[str, int], set[str]]:
        outputs: dict[str, int] = {}
        last = set()
        while self._batches and self._batches[0][0] <= start_ns:
            for key, ends in self._batches.popleft()[1]:
                outputs[key] = outputs.get(key, 0) + 1
                if ends:
                    last.add(key)
        return outputs, last


ENDING_WRITES = 3
"""Small writes that follow the last token of a stream: usage, `[DONE]`, the end of the body."""
