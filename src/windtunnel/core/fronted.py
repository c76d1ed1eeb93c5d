"""An engine behind its API server (`core.frontend`), as one engine whose outputs come when they reach the clients.

A request is the engine's at once, so that a refusal is known at once, but waits there for its release: until the front end has
done its work on it. A step's outputs wait for the front end to take and write them; what belongs to one sequence and is taken
in one turn leaves as one output. So the same machine plays a profile in virtual time (`sim.calibrate.replay`) and in real time
(`serve.driver`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import groupby

from windtunnel.core.engine import Engine
from windtunnel.core.frontend import Chunk, Frontend
from windtunnel.core.outputs import Refusal, StepOutput, TokenOutput
from windtunnel.core.pacing import Draws
from windtunnel.core.profile import Profile
from windtunnel.core.request import UNTIL_RELEASED, EngineRequest

MAX_EVENTS_PER_ADVANCE = 1024


class FrontedEngine:
    """What a driver needs of `Engine`. Owns the front end; the engine may be looked into by others.

    `advance` gives a step as the engine has it, less its outputs, when it ends, and each chunk as a `StepOutput` without stats.
    """

    def __init__(self, engine: Engine, profile: Profile, draws: Draws) -> None:
        self._engine = engine
        self._frontend = Frontend(profile.frontend, profile.request_noise, draws)
        self._wake_ns = round(profile.frontend.wake_ns)
        self._incoming: dict[str, list[str]] = {}
        """By prompt, the requests that are not released yet."""
        self._releases: list[tuple[int, str]] = []
        self._at_work: set[str] = set()
        """Released and not ended: without any the engine sleeps."""
        self._held: dict[str, list[TokenOutput]] = {}
        self._chunks: deque[Chunk] = deque()
        self._arrived_ns = 0

    def submit(self, requests: Sequence[EngineRequest], now_ns: int) -> Refusal | None:
        """See `Engine.submit`. The front end works on each prompt once, whatever its `n`, from its `arrival_ns` on."""
        held = [replace(request, deferred_until_ns=UNTIL_RELEASED) for request in requests]
        refusal = self._engine.submit(held, now_ns)
        if refusal is not None:
            return refusal
        for prompt, group in groupby(requests, key=lambda request: request.parent_id or request.request_id):
            children = list(group)
            self._arrived_ns = max(self._arrived_ns, children[0].arrival_ns)
            self._incoming[prompt] = [child.request_id for child in children]
            self._frontend.arrive(prompt, len(children[0].prompt_token_ids), self._arrived_ns)
        return None

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        """See `Engine.abort`. What the front end has begun it finishes, but nothing more is written without `notify`."""
        if not notify:
            for request_id in request_ids:
                self._held.pop(request_id, None)
                self._at_work.discard(request_id)
        return self._engine.abort(request_ids, now_ns, notify=notify)

    def let_go(self, now_ns: int) -> list[TokenOutput]:
        """The front end goes: everything is released. Returns the outputs that were not written yet."""
        self._engine.release([request_id for group in self._incoming.values() for request_id in group], now_ns)
        return [_joined(outputs) for outputs in self._held.values() if outputs]

    def next_event_at(self) -> int | None:
        times = [at_ns for at_ns in self._times() if at_ns is not None]
        return min(times) if times else None

    def _times(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Of the next chunk, release, step and turn. At one instant the earlier kind goes first."""
        return (
            self._chunks[0].at_ns if self._chunks else None,
            self._releases[0][0] if self._releases else None,
            self._engine.next_event_at(),
            self._frontend.next_event_at(),
        )

    def advance(self, now_ns: int) -> list[StepOutput]:
        """Everything that is due, in the order of its times and not of the call's; more may be due afterwards."""
        done: list[StepOutput] = []
        for _ in range(MAX_EVENTS_PER_ADVANCE):
            due = [(at_ns, kind) for kind, at_ns in enumerate(self._times()) if at_ns is not None]
            if not due or min(due)[0] > now_ns:
                break
            at_ns, kind = min(due)
            done += (self._write, self._release, self._step, self._turn)[kind](at_ns)
        return done

    def _write(self, at_ns: int) -> Sequence[StepOutput]:
        chunk = self._chunks.popleft()
        held = self._held.get(chunk.key)
        if not held:
            return ()
        taken, self._held[chunk.key] = held[: chunk.outputs], held[chunk.outputs :]
        if chunk.last:
            del self._held[chunk.key]
        return (StepOutput(at_ns, [_joined(taken)]),)

    def _release(self, at_ns: int) -> Sequence[StepOutput]:
        children = self._incoming.pop(heappop(self._releases)[1], [])
        self._at_work.update(children)
        self._engine.release(children, at_ns)
        return ()

    def _step(self, at_ns: int) -> Sequence[StepOutput]:
        steps = self._engine.advance(at_ns)
        for step in steps:
            if not step.outputs:
                continue
            ends = [output.finish_reason is not None or output.error is not None for output in step.outputs]
            for output, last in zip(step.outputs, ends, strict=True):
                self._held.setdefault(output.request_id, []).append(output)
                if last:
                    self._at_work.discard(output.request_id)
            self._frontend.take_outputs(
                [(output.request_id, last) for output, last in zip(step.outputs, ends, strict=True)], step.at_ns
            )
            step.outputs = []
        return steps

    def _turn(self, _at_ns: int) -> Sequence[StepOutput]:
        submissions, chunks = self._frontend.turn()
        wake_ns = 0 if self._at_work else self._wake_ns
        for submission in submissions:
            heappush(self._releases, (submission.at_ns + wake_ns, submission.key))
        self._chunks += chunks
        return ()


def _joined(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """One output in place of several of one sequence."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    tokens = tuple(token for output in outputs for token in output.token_ids)
    return last._replace(token_ids=tokens, cached_tokens=first.cached_tokens)
