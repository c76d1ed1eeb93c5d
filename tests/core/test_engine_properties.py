"""Properties of any run: conservation, no leak, determinism, the right answer, an event stream that can be replayed."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.rig import VOCABULARY, Rig, hash_of, lora, request

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import FinishReason
from windtunnel.core.pacing import Duration, Pacing, RequestPacing, StepPacing
from windtunnel.core.request import MediaItem
from windtunnel.core.sources import OracleSource

PACINGS: dict[str, Callable[[], Pacing]] = {
    "step": lambda: StepPacing(1_000, 3, 7),
    "no_time": lambda: StepPacing(0, 0, 0),
    "own_pace": lambda: RequestPacing(
        random.Random(5), Duration(4_000, 2_000, "lognormal"), Duration(900, 500, "normal"), prefill_token_ns=2, load_factor=2.0
    ),
    "as_fast_as_possible": lambda: RequestPacing(random.Random(5)),
}


@dataclass(frozen=True)
class Arrival:
    at_ns: int
    prompt_tokens: int
    shared_tokens: int
    max_tokens: int
    natural: int | None
    priority: int
    adapter: str | None
    deferred_ns: int
    abort_after_ns: int | None
    picture: str | None


arrivals = st.builds(
    Arrival,
    at_ns=st.integers(0, 30_000),
    prompt_tokens=st.integers(1, 90),
    shared_tokens=st.integers(0, 64),
    max_tokens=st.integers(1, 50),
    natural=st.none() | st.integers(0, 40),
    priority=st.integers(-1, 1),
    adapter=st.none() | st.sampled_from("xyz"),
    deferred_ns=st.just(0) | st.integers(1, 20_000),
    abort_after_ns=st.none() | st.integers(0, 40_000),
    picture=st.none() | st.sampled_from(["cat", "dog"]),
)
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(11, 40),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.sampled_from([5, 33, 2048]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_loras": st.integers(0, 2),
        "reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.2]),
        "long_prefill_token_threshold": st.sampled_from([0, 10]),
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "block_size": st.sampled_from([4, 16]),
    }
)


def build(name: str, arrival: Arrival) -> Any:
    shared = tuple(range(arrival.shared_tokens))[: arrival.prompt_tokens - 1]
    own = tuple(5_000 + hash_of(name) + at for at in range(arrival.prompt_tokens - len(shared)))
    return request(
        name,
        shared + own,
        arrival.max_tokens,
        source=OracleSource(hash_of(name), VOCABULARY, arrival.natural),
        arrival_ns=arrival.at_ns,
        priority=arrival.priority,
        lora=lora(arrival.adapter) if arrival.adapter else None,
        media=(MediaItem(arrival.picture, 2, 9),) if arrival.picture else (),
        deferred_until_ns=arrival.at_ns + arrival.deferred_ns if arrival.deferred_ns else 0,
    )


def play(config: dict[str, Any], pacing: str, plan: list[Arrival]) -> Rig:
    """Submit and abort at the planned times, run everything between, then come to rest."""
    config = dict(config, max_model_len=140, num_blocks=config["num_blocks"] * 16 // config["block_size"])
    rig = Rig(PACINGS[pacing](), **config)
    acts: list[tuple[int, int, Callable[[], object]]] = []
    for at, arrival in enumerate(plan):
        name = f"r{at}"
        acts.append((arrival.at_ns, len(acts), lambda name=name, arrival=arrival: rig.submit(build(name, arrival))))
        if arrival.abort_after_ns is not None:
            acts.append(
                (
                    arrival.at_ns + arrival.abort_after_ns,
                    len(acts),
                    lambda name=name, at=at: rig.abort(name, notify=at % 2 == 0),
                )
            )
    for at_ns, _number, act in sorted(acts, key=lambda act: act[:2]):
        rig.run(lambda at_ns=at_ns: (rig.engine.next_event_at() or 0) > at_ns)
        rig.now_ns = max(rig.now_ns, at_ns)
        act()
        rig.engine.check_integrity()
    rig.run()
    return rig


@settings(max_examples=80, deadline=None)
@given(configs, st.sampled_from(sorted(PACINGS)), st.lists(arrivals, min_size=1, max_size=12))
def test_every_run_is_conserved_leakless_and_right(config: dict[str, Any], pacing: str, plan: list[Arrival]) -> None:
    rig = play(config, pacing, plan)
    ends = Counter(t.request_id for t in rig.log if t.after.terminal)
    assert ends == {f"r{at}": 1 for at in range(len(plan))}, "each sequence ends exactly once"
    assert rig.engine.live() == []
    assert rig.engine.next_event_at() is None
    last = [step.stats for step in rig.steps if step.stats is not None][-1]
    assert (last.running, last.waiting, last.deferred, last.kv_usage) == (0, 0, 0, 0.0)
    assert rig.cached == rig.engine.cached_hashes
    for at, arrival in enumerate(plan):
        check_answer(rig, f"r{at}", arrival)


def check_answer(rig: Rig, name: str, arrival: Arrival) -> None:
    whole = [
        *OracleSource(hash_of(name), VOCABULARY, arrival.natural).token_ids(0, 60),
        *([9999] if arrival.natural is not None else []),
    ]
    limit = min(arrival.max_tokens, 140 - arrival.prompt_tokens)
    want = whole[:limit]
    got = rig.tokens.get(name, [])
    assert got == want[: len(got)]
    if rig.states[name] is State.FINISHED:
        assert got == want
        ended = arrival.natural is not None and len(want) == arrival.natural + 1
        assert rig.finish[name] is (FinishReason.STOP if ended else FinishReason.LENGTH)
    else:
        assert rig.states[name] is State.ABORTED
        assert arrival.abort_after_ns is not None


@settings(max_examples=25, deadline=None)
@given(configs, st.sampled_from(sorted(PACINGS)), st.lists(arrivals, min_size=1, max_size=10))
def test_the_same_inputs_give_the_same_log(config: dict[str, Any], pacing: str, plan: list[Arrival]) -> None:
    first, second = play(config, pacing, plan), play(config, pacing, plan)
    assert repr(first.log) == repr(second.log)
    assert repr(first.steps) == repr(second.steps)


@settings(max_examples=25, deadline=None)
@given(configs, st.lists(arrivals, min_size=1, max_size=10))
def test_what_the_gauges_count_is_what_the_log_says(config: dict[str, Any], plan: list[Arrival]) -> None:
    rig = play(config, "step", plan)
    running = 0
    moves = {Event.SCHEDULE: 1, Event.PREEMPT: -1}
    for step in rig.steps:
        for transition in step.transitions:
            left = transition.after.terminal and transition.before in (State.PREFILL, State.DECODE)
            running += moves.get(transition.event, 0) - left
        if step.stats is not None:
            assert step.stats.running == running
    assert sum(rig.stats("preemptions")) == rig.count(Event.PREEMPT)
