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
from windtunnel.core.profile import ProfilePacing
from windtunnel.core.request import UNTIL_RELEASED, EngineRequest

MAX_EVENTS_PER_ADVANCE = 1024
_NEVER = 1 << 63


class FrontedEngine:
    """What a driver needs of `Engine`. Owns the front end; the engine may be looked into by others.

    Other jobs of the machine (`core.machine`) slow both while both have work, and the engine alone where it wants more cores
    than they leave.

    `advance` gives a step as the engine has it, less its outputs, when it ends, and each chunk as a `StepOutput` without stats.
    """

    def __init__(self, engine: Engine, pacing: ProfilePacing, draws: Draws) -> None:
        """`pacing`: the engine's own."""
        profile = pacing.profile
        self._engine = engine
        self._contention = profile.frontend.contention
        self._machine = profile.machine
        self._pacing = pacing
        self._frontend = Frontend(profile.frontend, profile.request_noise, draws)
        self._wake_ns = round(profile.frontend.wake_ns)
        self._children: dict[str, list[str]] = {}
        """Of each prompt on its way in, its requests."""
        self._incoming: set[str] = set()
        """Requests that are neither released nor ended."""
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
            self._children[prompt] = [child.request_id for child in children]
            self._incoming.update(self._children[prompt])
            self._frontend.arrive(prompt, len(children[0].prompt_token_ids), self._arrived_ns)
        return None

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        """See `Engine.abort`. Without `notify` nothing is written that is not the engine's later doing."""
        for request_id in request_ids:
            self._forget(request_id)
            if not notify:
                self._held.pop(request_id, None)
        return self._engine.abort(request_ids, now_ns, notify=notify)

    def let_go(self, now_ns: int) -> list[TokenOutput]:
        """The front end goes: everything is released. Returns the outputs that were not written yet."""
        self._engine.release([one for group in self._children.values() for one in group if one in self._incoming], now_ns)
        return [_joined(outputs) for outputs in self._held.values()]

    def next_event_at(self) -> int | None:
        times = (
            self._chunks[0].at_ns if self._chunks else None,
            self._releases[0][0] if self._releases else None,
            self._engine.next_event_at(),
            self._frontend.next_event_at(),
        )
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def advance(self, now_ns: int) -> list[StepOutput]:
        """What is due, in the order of its times and not of the call's, up to the end of a sequence. More may be due then.

        So a client's next request is never later than what has been run. At one instant chunks go first, then releases.
        """
        done: list[StepOutput] = []
        step_ns, turn_ns = _or_never(self._engine.next_event_at()), _or_never(self._frontend.next_event_at())
        for _ in range(MAX_EVENTS_PER_ADVANCE):
            chunk_ns = self._chunks[0].at_ns if self._chunks else _NEVER
            release_ns = self._releases[0][0] if self._releases else _NEVER
            at_ns = min(chunk_ns, release_ns, step_ns, turn_ns)
            if at_ns > now_ns:
                break
            if chunk_ns == at_ns:
                if self._write(done):
                    break
            elif release_ns == at_ns:
                self._release(at_ns)
                step_ns = _or_never(self._engine.next_event_at())
            elif step_ns == at_ns:
                done += self._step(at_ns)
                step_ns, turn_ns = _or_never(self._engine.next_event_at()), _or_never(self._frontend.next_event_at())
            else:
                self._turn()
                step_ns, turn_ns = _or_never(self._engine.next_event_at()), _or_never(self._frontend.next_event_at())
        return done

    def _write(self, done: list[StepOutput]) -> bool:
        """Write the next chunk. True: it ends its sequence."""
        chunk = self._chunks.popleft()
        held = self._held.pop(chunk.key, None)
        if held is None:
            return False
        taken, rest = held[: chunk.outputs], held[chunk.outputs :]
        if rest:
            self._held[chunk.key] = rest
        done.append(StepOutput(chunk.at_ns, [_joined(taken)]))
        return chunk.last

    def _release(self, at_ns: int) -> None:
        prompt = heappop(self._releases)[1]
        children = [one for one in self._children.pop(prompt, ()) if one in self._incoming]
        self._incoming.difference_update(children)
        self._at_work.update(children)
        self._engine.release(children, at_ns)

    def _step(self, at_ns: int) -> Sequence[StepOutput]:
        self._pacing.stretch = self._machine.engine_stretch(self._pacing.other_jobs.at(at_ns))
        steps = self._engine.advance(at_ns)
        for step in steps:
            if step.outputs:
                self._frontend.take_outputs([self._hold(output) for output in step.outputs], step.at_ns)
                step.outputs = []
        return steps

    def _hold(self, output: TokenOutput) -> tuple[str, bool]:
        request_id, last = output.request_id, output.finish_reason is not None or output.error is not None
        self._held.setdefault(request_id, []).append(output)
        if last:
            self._forget(request_id)
        return request_id, last

    def _forget(self, request_id: str) -> None:
        self._incoming.discard(request_id)
        self._at_work.discard(request_id)

    def _turn(self) -> None:
        others = self._pacing.other_jobs.at(_or_never(self._frontend.next_event_at()))
        stretch = self._machine.shared_stretch(others) if self._at_work else 1.0
        turn = self._frontend.turn(stretch)
        if self._at_work:
            lost = max(0.0, stretch - self._machine.engine_stretch(others)) * (turn.request_work_ns + turn.chunk_work_ns)
            self._engine.delay_step(round(self._contention * stretch * turn.request_work_ns + lost))
        wake_ns = 0 if self._at_work else self._wake_ns
        for submission in turn.submissions:
            heappush(self._releases, (submission.at_ns + wake_ns, submission.key))
        self._chunks += turn.chunks


def _or_never(at_ns: int | None) -> int:
    return _NEVER if at_ns is None else at_ns


def _joined(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """One output in place of several of one sequence."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    tokens = tuple(token for output in outputs for token in output.token_ids)
    return last._replace(token_ids=tokens, cached_tokens=first.cached_tokens)
