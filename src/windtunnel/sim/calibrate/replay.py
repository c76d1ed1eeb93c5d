"""A measured run's load again, in virtual time, against the simulated engine with a profile's timing.

What comes from the measurement is the load alone: how many clients, in which order which prompt and output lengths, how much
of each prompt was cached, the clients' pause between two requests (or, without a closed loop, the times of sending), and what
other jobs took of the machine.
"""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from windtunnel.core.fronted import FrontedEngine
from windtunnel.core.frontend import ENDING_WRITES
from windtunnel.core.machine import NO_OTHER_JOBS, OtherJobs
from windtunnel.core.outputs import TokenOutput
from windtunnel.core.profile import Profile, ProfilePacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sources import SequenceSource
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig
from windtunnel.sim.calibrate.measured import Measured, Run

MAX_EVENTS = 20_000_000
_NO_END_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the measured server was started with."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 16


def replay(run: Run, profile: Profile, limits: EngineLimits, *, seed: int) -> Run:
    """The same run as the simulator has it."""
    player = _Player(run, profile, limits, seed)
    return replace(run, requests=player.play())


@dataclass(slots=True)
class _Open:
    work: Measured
    sent_ns: int
    chunks: list[tuple[float, int]] = field(default_factory=list)


class _Player:
    """Owns the engine, the front end and the clients of one replay."""

    def __init__(self, run: Run, profile: Profile, limits: EngineLimits, seed: int) -> None:
        self._draws = random.Random(seed)
        self._pacing = pacing = ProfilePacing(profile, self._draws)
        self._engine = VllmEngine(_engine_config(run, limits), pacing)
        self._fronted = FrontedEngine(self._engine, pacing, self._draws)
        self._ending_ns = round(ENDING_WRITES * profile.frontend.chunk_ns)
        self._run = run
        self._thinks_ms = run.thinks_ms or [0.0]
        self._closed = run.concurrency
        self._todo = deque(sorted(run.requests, key=lambda request: request.sent_s))
        self._sends: list[tuple[int, int]] = []
        self._open: dict[str, _Open] = {}
        self._done: list[Measured] = []
        self._started = 0

    def play(self) -> list[Measured]:
        start_ns = self._warm()
        self._pacing.other_jobs = self._other_jobs(start_ns)
        self._first_sends(start_ns)
        for _ in range(MAX_EVENTS):
            if not self._next():
                return self._done
        raise RuntimeError(f"the replay did not end within {MAX_EVENTS} events")

    def _other_jobs(self, start_ns: int) -> OtherJobs:
        jobs = self._run.other_jobs
        if not (jobs and self._todo):
            return NO_OTHER_JOBS
        first_s = self._todo[0].sent_s
        return OtherJobs([cores for _at, cores in jobs], [start_ns + round(1e9 * (at_s - first_s)) for at_s, _cores in jobs])

    def _first_sends(self, start_ns: int) -> None:
        if self._closed is not None:
            self._sends = [(start_ns, number) for number in range(min(self._closed, len(self._todo)))]
            return
        first_s = self._todo[0].sent_s if self._todo else 0.0
        self._sends = [(start_ns + round(1e9 * (work.sent_s - first_s)), number) for number, work in enumerate(self._todo)]

    def _warm(self) -> int:
        """Put the prefix that later requests find cached into the cache."""
        longest = max((work.cached_tokens for work in self._todo), default=0)
        if not longest:
            return 0
        request = EngineRequest("warm", (*_prefix(longest), 1), SequenceSource((0,), ignore_eos=True), 1, 0)
        self._engine.submit([request], 0)
        while (at_ns := self._engine.next_event_at()) is not None:
            start_ns = at_ns
            self._engine.advance(at_ns)
        return start_ns

    def _next(self) -> bool:
        """The next sending, or what the server does before it. False: nothing is left."""
        send_ns, server_ns = (self._sends[0][0] if self._sends else None), self._fronted.next_event_at()
        if send_ns is not None and (server_ns is None or send_ns <= server_ns):
            self._send(send_ns)
        elif server_ns is not None:
            self._serve(_NO_END_NS if send_ns is None else send_ns)
        return send_ns is not None or server_ns is not None

    def _send(self, at_ns: int) -> None:
        heappop(self._sends)
        if not self._todo:
            return
        work, key = self._todo.popleft(), str(self._started)
        own = self._started * 10_000 + 20_000_000
        self._started += 1
        self._open[key] = _Open(work, at_ns)
        prompt = (*_prefix(work.cached_tokens), *range(own, own + work.prompt_tokens - work.cached_tokens))
        source = SequenceSource((0,), ignore_eos=True)
        self._fronted.submit([EngineRequest(key, prompt, source, work.output_tokens, at_ns, ignore_eos=True)], at_ns)

    def _serve(self, until_ns: int) -> None:
        for step in self._fronted.advance(until_ns):
            for output in step.outputs:
                self._receive(output, step.at_ns)

    def _receive(self, output: TokenOutput, at_ns: int) -> None:
        one = self._open[output.request_id]
        made = (one.chunks[-1][1] if one.chunks else 0) + len(output.token_ids)
        one.chunks.append(((at_ns - one.sent_ns) / 1e6, made))
        if output.finish_reason is None:
            return
        end_ns = at_ns + self._ending_ns
        work, e2e_ms = one.work, (end_ns - one.sent_ns) / 1e6
        self._done.append(Measured(one.sent_ns / 1e9, work.prompt_tokens, made, tuple(one.chunks), e2e_ms, work.cached_tokens))
        del self._open[output.request_id]
        if self._closed is not None:
            pause_ms = self._thinks_ms[int(self._draws.random() * len(self._thinks_ms))]
            heappush(self._sends, (end_ns + round(pause_ms * 1e6), self._started))


def _prefix(tokens: int) -> range:
    return range(10, 10 + tokens)


def _engine_config(run: Run, limits: EngineLimits) -> VllmEngineConfig:
    longest = max((work.prompt_tokens + work.output_tokens for work in run.requests), default=1) + 1
    tokens = sum(work.prompt_tokens + work.output_tokens + limits.block_size for work in run.requests) + 2 * longest
    return VllmEngineConfig(
        num_blocks=tokens // limits.block_size + 2,
        block_size=limits.block_size,
        max_model_len=longest,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        enable_prefix_caching=any(work.cached_tokens for work in run.requests),
    )
