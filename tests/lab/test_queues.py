"""What became of a queue after a storm: polls, drain and residual, in the target's time."""

from dataclasses import replace

from windtunnel.lab.findings import find
from windtunnel.lab.plan import Api, Role, StormPlan
from windtunnel.lab.queues import queues_of
from windtunnel.lab.record import Ask, End, Sample, StormResult, StreamRecord

S = 1_000_000_000
KEY = "num_prefill_inflight_queue_reqs"
LEFT_NS = 10 * S


def _result(values: list[tuple[float, float]], *, baseline: float = 1, scale: float = 1, polls: int = 5) -> StormResult:
    """`values` are (seconds after the last victim left, gauge), in the target's time."""
    samples = [Sample(LEFT_NS + round(at_s * S / scale), "quiet", 0, 1, {KEY: value}, {}) for at_s, value in values]
    ask = Ask(1, Role.VICTIM, 0, Api.COMPLETIONS, "a", 4, True)
    victim = StreamRecord(ask, End.LEFT, 0, LEFT_NS, left_in="sent", left_ns=LEFT_NS)
    plan = StormPlan(polls=polls, poll_every_ns=round(12 * S / scale), time_scale=scale)
    return StormResult(
        plan=plan,
        kind="sglang",
        cancel_grace_ns=4 * S,
        watches={KEY: "queue"},
        baseline=Sample(0, "baseline", 0, 0, {KEY: baseline}, {}),
        oracle=False,
        streams=(victim,),
        bystanders=(),
        samples=tuple(samples),
        phases=(),
        quiet_ns=None,
        at_deadline=None,
        after_probe=None,
    )


CLASSIC = [(0, 4), (6, 11), (12, 11), (24, 11), (30, 11), (33, 1), (36, 1), (48, 1), (60, 1)]


def test_the_classic_table() -> None:
    for scale in (1, 20):
        (queue,) = queues_of(_result(CLASSIC, scale=scale))
        assert queue.document() == {
            "baseline": 1,
            "peak": 11,
            "polls": [11, 11, 1, 1, 1],
            "held": 10,
            "highest_poll": 11,
            "drained_at_s": 33,
            "residual": 0,
        }


def test_a_queue_that_never_drains_and_one_that_never_rose() -> None:
    (stuck,) = queues_of(_result([(0, 11), (60, 11)]))
    assert stuck.drained_at_s is None and stuck.residual == 10
    (calm,) = queues_of(_result([(0, 1), (12, 1), (60, 1)]))
    assert (calm.drained_at_s, calm.residual, calm.held) == (0, 0, 0)


def test_polls_without_samples_are_left_out() -> None:
    (queue,) = queues_of(_result([(0, 3), (13, 2)]))
    assert queue.polls == (2,)


def test_a_late_clean_up_is_a_finding_of_its_own() -> None:
    found = {one.name: one for one in find(_result(CLASSIC, scale=20))}
    assert found["hidden_cleanup"].evidence == (
        f"{KEY} stood 10 above its baseline after the storm and came back by itself 33 s after the last client had left,"
        " 1 that was there before stays",
    )
    for values in ([(0, 11), (10, 1), (60, 1)], [(0, 11), (60, 11)], [(0, 1), (60, 1)]):
        assert "hidden_cleanup" not in {one.name for one in find(_result(values))}


def test_what_a_probe_brings_back_has_not_come_back_by_itself() -> None:
    """A gauge that nobody had written again: SGLang's decode reports its transfer queue every 40 steps."""
    result = _result([(0, 3), (20, 3), (21, 1), (60, 1)])
    assert "hidden_cleanup" in {one.name for one in find(result)}
    deadline = replace(result.samples[0], at_ns=LEFT_NS + 20 * S)
    assert "hidden_cleanup" not in {one.name for one in find(replace(result, at_deadline=deadline))}
