"""`RunVllmEngine` decides exactly as `VllmEngine`, step by step, for random loads and operators."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from windtunnel.core.outputs import FinishReason, StepOutput
from windtunnel.core.pacing import RequestPacing, StepPacing
from windtunnel.core.request import EngineRequest, Repetition
from windtunnel.core.sources import SequenceSource
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig
from windtunnel.core.vllm.runs import RunVllmEngine, TokenRun

PACING = StepPacing(1000, 3, 17)


class Watcher:
    """Collects what an engine says: tokens with their times, and everything else as it came."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[tuple[int, int]]] = {}
        self.log: list[object] = []

    def runs(self, runs: list[TokenRun]) -> None:
        for run in runs:
            assert len(run.token_ids) == len(run.times_ns)
            self.tokens.setdefault(run.request_id, []).extend(zip(run.token_ids, run.times_ns, strict=True))

    def steps(self, steps: list[StepOutput]) -> None:
        for step in steps:
            for output in step.outputs:
                heard = self.tokens.setdefault(output.request_id, [])
                heard += [(token, step.at_ns) for token in output.token_ids]
                if output.finish_reason is not None:
                    self.log.append((output.request_id, output.finish_reason, output.stop_reason, output.cached_tokens))
            self.log.append((step.at_ns, step.transitions, step.stats, list(step.kv_events)))


class Pair:
    """Both engines under the same hand."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self.plain, self.runs = VllmEngine(config, PACING), RunVllmEngine(config, PACING)
        self.seen = Watcher(), Watcher()

    def do(self, action: str, *args: object, **options: object) -> None:
        answers = [getattr(engine, action)(*args, **options) for engine in (self.plain, self.runs)]
        assert answers[0] == answers[1], action
        self.seen[1].runs(self.runs.take_runs())

    def advance(self, now_ns: int) -> None:
        while (at_ns := self.plain.next_event_at()) is not None and at_ns <= now_ns:
            self.seen[0].steps(self.plain.advance(now_ns))
        while (at_ns := self.runs.next_event_at()) is not None and at_ns <= now_ns:
            steps = self.runs.advance(now_ns)
            self.seen[1].runs(self.runs.take_runs())
            self.seen[1].steps(steps)
        self.plain.check_integrity()
        self.runs.check_integrity()
        assert self.plain.next_event_at() == self.runs.next_event_at()
        assert self.plain.live() == self.runs.live()

    def compare(self) -> None:
        assert self.seen[0].log == self.seen[1].log
        for request_id, tokens in self.seen[0].tokens.items():
            assert sorted(self.seen[1].tokens[request_id], key=lambda token: token[1]) == tokens


CONFIGS = st.builds(
    lambda blocks, seqs, budget, policy, caching, threshold: VllmEngineConfig(
        num_blocks=blocks,
        block_size=4,
        max_model_len=64,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        policy=policy,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
        collect_kv_events=True,
        eos_token_id=7,
        unsafe_pool=True,
    ),
    st.integers(18, 60),
    st.integers(1, 8),
    st.integers(1, 40),
    st.sampled_from(["fcfs", "priority"]),
    st.booleans(),
    st.sampled_from([0, 0, 5]),
)


def request(number: int, draws: Random) -> EngineRequest:
    prompt = tuple(draws.choice([1, 2, 3]) for _ in range(draws.choice([1, 3, 4, 8, 9, 17, 30])))
    answer = SequenceSource([draws.randint(8, 30) for _ in range(draws.randint(1, 40))], ignore_eos=draws.random() < 0.5)
    return EngineRequest(
        f"r{number}",
        prompt,
        answer,
        draws.randint(1, 40),
        0,
        priority=draws.randint(0, 3),
        stop_token_ids=frozenset({9}),
        repetition=draws.choice([None, None, Repetition(1, 3, 2)]),
    )


def one_move(pair: Pair, number: int, now_ns: int, draws: Random) -> None:
    live = [view.request_id for view in pair.plain.live()]
    match draws.random():
        case move if move < 0.55:
            pair.do("submit", [request(number, draws)], now_ns)
        case move if move < 0.7 and live:
            pair.do("abort", [draws.choice(live)], now_ns, notify=draws.random() < 0.5)
        case move if move < 0.75:
            pair.do("pause", "keep", now_ns)
        case move if move < 0.82:
            pair.do("resume", now_ns)
        case move if move < 0.86:
            pair.do("reset_prefix_cache", now_ns, reset_running=True)
        case move if move < 0.9:
            changed = replace(pair.plain.config, max_num_batched_tokens=draws.randint(1, 40), max_num_seqs=draws.randint(1, 8))
            pair.do("reconfigure", changed, now_ns=now_ns)
        case move if move < 0.95 and live:
            pair.runs.report_now(draws.choice(live))
            pair.seen[1].runs(pair.runs.take_runs())
        case _ if live:
            watched = draws.choice(pair.plain.live())
            pair.runs.watch(watched.request_id, watched.output_tokens + draws.randint(1, 12))


@settings(max_examples=150, derandomize=True, phases=[Phase.generate], deadline=None)
@given(config=CONFIGS, seed=st.integers(0, 2**32))
def test_equal_in_every_step(config: VllmEngineConfig, seed: int) -> None:
    draws, pair, now_ns = Random(seed), Pair(config), 0
    for number in range(60):
        one_move(pair, number, now_ns, draws)
        now_ns += draws.choice([0, 1, 500, 1100, 3000, 20_000])
        pair.advance(now_ns)
    pair.do("resume", now_ns)
    pair.advance(now_ns + 10_000_000)
    if seed % 4 == 0:
        pair.do("kill", now_ns + 10_000_000)
        pair.advance(now_ns + 20_000_000)
    for view in pair.plain.live():
        pair.runs.report_now(view.request_id)
    pair.seen[1].runs(pair.runs.take_runs())
    pair.compare()


def test_a_watched_token_is_reported_in_its_step() -> None:
    engine = RunVllmEngine(VllmEngineConfig(), PACING)
    engine.submit([EngineRequest("r", (1,) * 20, SequenceSource([3], ignore_eos=True), 100, 0)], 0)
    engine.watch("r", 13)
    runs: list[TokenRun] = []
    while not runs:
        at_ns = engine.next_event_at()
        assert at_ns is not None
        engine.advance(at_ns)
        runs = engine.take_runs()
    assert runs[0].times_ns[-1] == at_ns and len(runs[0].token_ids) == 12


def test_long_runs_outlive_the_kept_step_times() -> None:
    config = VllmEngineConfig(num_blocks=20_000, max_model_len=200_000)
    engine, watcher = RunVllmEngine(config, PACING), Watcher()
    engine.submit([EngineRequest("r", (1,), SequenceSource([3], ignore_eos=True), 70_000, 0)], 0)
    while (at_ns := engine.next_event_at()) is not None:
        steps = engine.advance(at_ns + 100_000)
        watcher.runs(engine.take_runs())
        watcher.steps(steps)
    times = [at_ns for _token, at_ns in watcher.tokens["r"]]
    assert times == [1003 + 1017 * step for step in range(70_000)]
    assert ("r", FinishReason.LENGTH, None, 0) in watcher.log


def test_refuses_what_would_wake_everybody() -> None:
    with pytest.raises(ValueError, match="lock step"):
        RunVllmEngine(VllmEngineConfig(), RequestPacing(Random(0)))
    with pytest.raises(ValueError, match="async_scheduling"):
        RunVllmEngine(VllmEngineConfig(async_scheduling=True), PACING)
