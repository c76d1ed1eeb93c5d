"""A driver in virtual time for engine tests: runs an engine event by event and folds what it says."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from windtunnel.core.lifecycle import Event, State, Transition, next_state
from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored, FinishReason, KvEvent, StepOutput
from windtunnel.core.pacing import Pacing, StepPacing
from windtunnel.core.request import EngineRequest, Lora, TokenSource
from windtunnel.core.sources import OracleSource
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig

VOCABULARY = tuple((token,) for token in range(512))
EOS = 9999
STEP_NS = 1_000
LIMIT = 20_000


def lora(name: str) -> Lora:
    return Lora(name, f"/adapters/{name}", sum(name.encode()))


def request(
    request_id: str,
    prompt: int | Sequence[int] = 16,
    max_tokens: int = 8,
    *,
    source: TokenSource | None = None,
    arrival_ns: int = 0,
    **more: Any,
) -> EngineRequest:
    """`prompt`: the tokens, or how many (then no two requests share a block)."""
    tokens = tuple(prompt) if isinstance(prompt, Sequence) else tuple(1000 + hash_of(request_id) + at for at in range(prompt))
    endless = OracleSource(hash_of(request_id), VOCABULARY, None)
    return EngineRequest(request_id, tokens, source or endless, max_tokens, arrival_ns, **more)


def hash_of(text: str) -> int:
    return sum(code * 31**at for at, code in enumerate(text.encode())) % 100_000 * 1000


def engine(pacing: Pacing | None = None, **config: Any) -> VllmEngine:
    defaults = {"num_blocks": 65, "max_model_len": 1024, "eos_token_id": EOS, "collect_kv_events": True}
    return VllmEngine(VllmEngineConfig(**{**defaults, **config}), pacing or StepPacing(STEP_NS, 0, 0))


class Rig:
    """Owns one engine and everything it has said. Checks integrity after every event and each transition against the table."""

    def __init__(self, pacing: Pacing | None = None, **config: Any) -> None:
        self.engine = engine(pacing, **config)
        self.now_ns = 0
        self.steps: list[StepOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.stop_reason: dict[str, Any] = {}
        self.log: list[Transition] = []
        self.states: dict[str, State] = {}
        self.cached: set[bytes] = set()

    def submit(self, *requests: EngineRequest) -> Any:
        return self.engine.submit(requests, self.now_ns)

    def abort(self, *request_ids: str, notify: bool = False) -> int:
        return self.engine.abort(request_ids, self.now_ns, notify=notify)

    def event(self) -> list[StepOutput]:
        """Go to the next event and run it."""
        at_ns = self.engine.next_event_at()
        assert at_ns is not None, "the engine is idle"
        self.now_ns = max(self.now_ns, at_ns)
        done = self.engine.advance(self.now_ns)
        for step in done:
            self._fold(step)
        self.engine.check_integrity()
        return done

    def step(self) -> StepOutput:
        """Run until a step has ended; the next one may be under way."""
        for _ in range(LIMIT):
            done = self.event()
            if done:
                return done[-1]
        raise AssertionError("no step ends")

    def run(self, until: Callable[[], bool] | None = None) -> None:
        for _ in range(LIMIT):
            if self.engine.next_event_at() is None or (until is not None and until()):
                return
            self.event()
        raise AssertionError("the engine does not come to rest")

    def state(self, request_id: str) -> State:
        return next(view.state for view in self.engine.live() if view.request_id == request_id)

    def ids(self, *states: State) -> list[str]:
        return [view.request_id for view in self.engine.live() if view.state in states]

    def count(self, event: Event) -> int:
        return sum(1 for transition in self.log if transition.event is event)

    def stats(self, field: str) -> Iterator[Any]:
        return (getattr(step.stats, field) for step in self.steps if step.stats is not None)

    def _fold(self, step: StepOutput) -> None:
        self.steps.append(step)
        assert len({output.request_id for output in step.outputs}) == len(step.outputs), "a sequence took part twice"
        for output in step.outputs:
            assert output.request_id not in self.finish, "output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finish[output.request_id] = output.finish_reason
                self.stop_reason[output.request_id] = output.stop_reason
        for transition in step.transitions:
            assert next_state(transition.before, transition.event) is transition.after
            assert self.states.get(transition.request_id, State.NEW) is transition.before
            assert not self.log or self.log[-1].at_ns <= transition.at_ns <= step.at_ns
            self.states[transition.request_id] = transition.after
            self.log.append(transition)
        for event in step.kv_events:
            replay(self.cached, event)


def replay(cached: set[bytes], event: KvEvent) -> None:
    """What an external index does with an event."""
    if isinstance(event, BlockStored):
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert len(event.extra_keys) == len(event.block_hashes)
        assert event.parent_hash is None or event.parent_hash in cached
        cached.update(event.block_hashes)
    elif isinstance(event, BlockRemoved):
        cached.difference_update(event.block_hashes)
    else:
        assert isinstance(event, AllBlocksCleared)
        cached.clear()


def expected(request_id: str, count: int) -> list[int]:
    """The tokens that `request(request_id)` makes."""
    return list(OracleSource(hash_of(request_id), VOCABULARY, None).token_ids(0, count))
