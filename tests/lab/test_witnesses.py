"""A busy machine is not a slow server: what times samples prove, and what they leave open."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from windtunnel.core.units import MS, S
from windtunnel.lab.findings import doubts, find
from windtunnel.lab.latency import Pair, pairs_of
from windtunnel.lab.outlived import freed_after_ns, outlived
from windtunnel.lab.plan import Api, Role, StormPlan
from windtunnel.lab.pulse import lag_ns, starved
from windtunnel.lab.record import Ask, BystanderRecord, End, Lag, Phase, Sample, StormResult, StreamRecord
from windtunnel.lab.sampler import is_quiet

EVERY = 20 * MS
GONE = 1 * S


def sample(at_ns: int, running: float | None, clients: int = 0, made: float = 0.0) -> Sample:
    """`running` None: the gauge was NaN."""
    gauges = {"waiting": 0.0, **({} if running is None else {"running": running})}
    return Sample(at_ns, "quiet", clients, 2, gauges, {"generation_tokens": made})


def stream(role: Role, end: End, started_ns: int, ended_ns: int, **more: object) -> StreamRecord:
    ask = Ask(started_ns + ended_ns, role, int(str(more.pop("round", 0))), Api.COMPLETIONS, "a", 100, True)
    return replace(StreamRecord(ask, end, started_ns, ended_ns), **more)  # type: ignore[arg-type]


def victim(round_: int = 0, left_ns: int = GONE - 5 * MS) -> StreamRecord:
    return stream(Role.VICTIM, End.LEFT, 0, GONE, left_ns=left_ns, gone_ns=GONE, round=round_)


def storm(samples: Sequence[Sample], *streams: StreamRecord, **more: object) -> StormResult:
    result = StormResult(
        plan=StormPlan(sample_every_ns=EVERY),
        kind="vllm",
        cancel_grace_ns=500 * MS,
        watches={"running": "running", "waiting": "waiting"},
        baseline=sample(0, 0),
        oracle=True,
        streams=(victim(), *streams),
        bystanders=(),
        samples=tuple(samples),
        phases=(),
        quiet_ns=2 * S,
        at_deadline=None,
        after_probe=None,
    )
    return replace(result, **more)  # type: ignore[arg-type]


def regular(until_ns: int, running: float) -> list[Sample]:
    return [sample(at_ns, running) for at_ns in range(GONE + EVERY, GONE + until_ns, EVERY)]


def test_work_that_many_samples_show_is_late() -> None:
    late = storm([*regular(700 * MS, 8), sample(GONE + 700 * MS, 0)])
    assert outlived(late).longer_than(500 * MS)
    assert [one.name for one in find(late)] == ["late_cancel"]
    assert freed_after_ns(late) == 705 * MS
    assert not [line for line in doubts(late) if "few" in line]


def test_work_within_the_grace_is_not() -> None:
    assert find(storm([*regular(480 * MS, 8), sample(GONE + 500 * MS, 0)])) == ()


@pytest.mark.parametrize("gap_ms", [300, 600, 2_000])
def test_a_machine_that_stood_still_proves_nothing(gap_ms: int) -> None:
    """The samples of the whole storm come every 20 ms; then nobody is given the processor, and the gauges are a step behind."""
    before = [sample(at_ns, 8, clients=8) for at_ns in range(EVERY, GONE, EVERY)]
    shown = [sample(GONE + EVERY, 8), sample(GONE + gap_ms * MS, 8), sample(GONE + (gap_ms + 20) * MS, 8)]
    after = sample(GONE + (gap_ms + 40) * MS, 0)
    result = storm([*before, *shown, after])
    assert find(result) == ()
    assert bool([line for line in doubts(result) if "too few" in line]) is (gap_ms > 500)


def test_time_between_samples_that_came_late_is_not_witnessed() -> None:
    before = [sample(at_ns, 8, clients=8) for at_ns in range(EVERY, GONE, EVERY)]
    shown = [sample(GONE + at * 300 * MS, 8) for at in range(1, 8)]
    seen = outlived(storm([*before, *shown]))
    assert (seen.elapsed_ns, seen.witnessed_ns, seen.samples) == (2_100 * MS, 7 * 30 * MS, 7)
    assert find(storm([*before, *shown])) == ()


def test_a_few_samples_are_too_few_at_any_pace() -> None:
    shown = [sample(GONE + at * 200 * MS, 8) for at in range(1, 5)]
    seen = outlived(storm(shown))
    assert seen.witnessed_ns > 500 * MS and seen.samples == 4
    assert find(storm(shown)) == ()


def test_a_client_may_be_one_whose_request_is_not_admitted_yet() -> None:
    """Samples with as much work as clients leave it open, and the work afterwards counts when it is no gauge's lag."""
    unclear = [sample(at_ns, 1, clients=1) for at_ns in range(GONE + EVERY, GONE + 400 * MS, EVERY)]
    shown = [sample(at_ns, 1) for at_ns in range(GONE + 400 * MS, GONE + 700 * MS, EVERY)]
    assert [one.name for one in find(storm([*unclear, *shown]))] == ["late_cancel"]
    glitch = [sample(GONE + 600 * MS, 1), sample(GONE + 620 * MS, 0)]
    assert find(storm([*unclear, *glitch])) == ()


def test_work_after_a_sample_that_showed_none_is_somebody_elses() -> None:
    free = sample(GONE + EVERY, 0)
    assert find(storm([free, *[sample(GONE + 30 * MS + at * EVERY, 1) for at in range(40)]])) == ()


def test_what_ran_to_its_end_was_not_cancelled() -> None:
    samples = [*regular(700 * MS, 8), sample(GONE + 700 * MS, 0)]
    counted = replace(samples[-1], counters={"request_success{length}": 1.0, "generation_tokens": 100.0})
    result = storm(samples, settled=counted)
    assert [one.name for one in find(result)] == ["zombie_tokens"]


def test_the_direct_check_is_not_work_for_nobody() -> None:
    idle = [sample(GONE + at * EVERY, 0) for at in range(1, 60)]
    checked = [sample(GONE + at * EVERY, 1, made=20.0) for at in range(60, 64)]
    start_ns = GONE + 59 * EVERY + 1
    assert [one.name for one in find(storm([*idle, *checked]))] == ["zombie_tokens"]
    in_flight = [*idle[:-1], replace(idle[-1], counters={"generation_tokens": 3.0})]
    assert find(storm([*in_flight, *checked], phases=(Phase("direct", start_ns, start_ns + S),))) == ()


def test_a_gauge_that_cannot_be_read_is_not_zero() -> None:
    unknown = sample(GONE + EVERY, None)
    assert not is_quiet(unknown, sample(0, 0), {"running": "running"})
    assert is_quiet(sample(GONE, 0), sample(0, 0), {"running": "running"})
    nan = [sample(GONE + at * EVERY, None) for at in range(1, 50)]
    result = storm(nan, quiet_ns=None, at_deadline=nan[-1], after_probe=nan[-1])
    assert find(result) == ()
    assert freed_after_ns(result) is None


def test_lags_are_cut_to_the_time_in_question() -> None:
    lags = (Lag(0, 10), Lag(95, 10))
    assert lag_ns(lags, 5, 100) == 10
    assert not starved(lags, 5, 100)
    assert starved(lags, 95, 105)


def test_time_outs_that_the_lab_slept_through_are_not_judged() -> None:
    hung = stream(Role.LATER, End.TIMEOUT, 2 * S, 5 * S)
    assert [one.name for one in find(storm([], hung))] == ["wedged"]
    slept = storm([], hung, lags=(Lag(2_500 * MS, 2_400 * MS),))
    assert find(slept) == ()
    assert any("not judged" in line for line in doubts(slept))
    asked = BystanderRecord("completion", 2 * S, 5 * S, 200, None, "no end within 3 s", hung.ask.tag)
    assert [one.name for one in find(storm([], hung, bystanders=(asked,)))] == ["wedged"]
    assert find(replace(slept, bystanders=(asked,))) == ()
    fetched = replace(asked, kind="metrics", tag=None)
    assert [one.name for one in find(storm([], bystanders=(fetched,)))] == ["bystander_error"]
    assert find(storm([], bystanders=(fetched,), lags=slept.lags)) == ()


def test_a_slow_stream_is_not_cut() -> None:
    words = ("a", "b")
    slow = stream(Role.SURVIVOR, End.TIMEOUT, 0, 3 * S, words=words, frame_ns=(S, 2_900 * MS))
    silent = replace(slow, frame_ns=(S, S))
    assert find(storm([], slow)) == ()
    assert [one.name for one in find(storm([], silent))] == ["unterminated_stream"]


def rounds(gaps: Sequence[tuple[float, float]]) -> StormResult:
    """One pair for each (gap without victims, gap with victims) in ms."""
    streams = []
    for round_, pair in enumerate(gaps):
        for role, gap in zip((Role.CALM, Role.SURVIVOR), pair, strict=True):
            frames = tuple(round(at * gap * MS) for at in range(20))
            streams.append(stream(role, End.FINISHED, 0, S, frame_ns=frames, round=round_))
        streams.append(victim(round_, left_ns=1))
    return storm([], *streams)


@pytest.mark.parametrize(
    ("gaps", "found"),
    [
        ([(4, 12)] * 10, True),
        ([(4, 12)] * 9, False),
        ([(4, 12)] * 9 + [(12, 4)], False),
        ([(4, 5)] * 10, False),
        ([(1, 2.5)] * 10, False),
        ([(4, 4)] * 10, False),
        ([(4 * load, 12 * load) for load in range(1, 11)], True),
    ],
)
def test_survivors_are_slower_when_every_pair_says_so(gaps: list[tuple[float, float]], found: bool) -> None:
    result = rounds(gaps)
    assert [one.name for one in find(result)] == (["survivor_slowdown"] if found else [])
    assert pairs_of(result)[0] == pytest.approx(Pair(*gaps[0]))


def test_a_storm_without_victims_says_that_nothing_was_tried() -> None:
    result = storm([], plan=StormPlan(victims=0))
    assert any("nothing was tried" in line for line in doubts(result))
