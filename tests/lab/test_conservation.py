"""Counters that do not add up are a finding, but not where both legs of a P/D pair count."""

from dataclasses import replace

import pytest

from windtunnel.lab.conservation import imbalances
from windtunnel.lab.findings import find
from windtunnel.lab.plan import Api, Role, StormPlan
from windtunnel.lab.record import Ask, End, Sample, StormResult, StreamRecord


def _result(counted: int, counters: dict[str, float]) -> StormResult:
    """One stream that finished, and so many requests counted."""
    before = Sample(0, "baseline", 0, 0, {"running": 0}, {"request_success{length}": 0, **counters})
    after = Sample(9, "later", 0, 1, {"running": 0}, {"request_success{length}": counted, **counters})
    stream = StreamRecord(Ask(1, Role.LATER, 0, Api.COMPLETIONS, "a", 4, True), End.FINISHED, 1, 2)
    return StormResult(
        plan=StormPlan(),
        kind="vllm",
        cancel_grace_ns=1,
        watches={"running": "running"},
        baseline=before,
        oracle=False,
        streams=(stream,),
        bystanders=(),
        samples=(before, after),
        phases=(),
        quiet_ns=None,
        at_deadline=None,
        after_probe=None,
        settled=after,
    )


@pytest.mark.parametrize(("counted", "found"), [(0, 1), (1, 0), (2, 1)])
def test_one_request_is_counted_once(counted: int, found: int) -> None:
    assert len(imbalances(_result(counted, {}))) == found


def test_what_is_asked_after_the_last_sample_is_not_counted() -> None:
    """Known pairs are compared at the very end."""
    result = _result(1, {})
    again = StreamRecord(Ask(2, Role.KNOWN, 0, Api.COMPLETIONS, "a", 4, True), End.FINISHED, 10, 12)
    assert imbalances(replace(result, streams=(*result.streams, again))) == []
    assert len(imbalances(replace(result, streams=(*result.streams, replace(again, started_ns=3))))) == 1


@pytest.mark.parametrize(("api", "found"), [(Api.COMPLETIONS, 1), (Api.MESSAGES, 0)])
def test_who_was_finished_unseen_was_computed(api: Api, found: int) -> None:
    """To its last token, unless its API lets it end before."""
    whole = _result(2, {})
    left = StreamRecord(Ask(2, Role.VICTIM, 0, api, "a", 400, True), End.LEFT, 1, 2, words=("w",) * 3, left_ns=2)
    whole = replace(whole, oracle=True, streams=(replace(whole.streams[0], words=("w",) * 4), left))
    assert whole.settled is not None
    tokens = replace(whole.settled, counters={**whole.settled.counters, "generation_tokens": 4 + 160})
    assert len(imbalances(replace(whole, settled=tokens))) == found


def test_a_vllm_with_a_kv_connector_may_count_each_leg() -> None:
    for connector in ("nixl", "mooncake"):
        assert imbalances(_result(2, {f"{connector}_num_kv_expired_reqs": 0})) == []


@pytest.mark.parametrize(("rise", "found"), [(0, []), (3, ["lease_expired"])])
def test_leases_that_ran_out_are_a_finding(rise: int, found: list[str]) -> None:
    before = _result(1, {"nixl_num_kv_expired_reqs": 2})
    after = replace(before.samples[-1], counters={"nixl_num_kv_expired_reqs": 2 + rise})
    findings = find(replace(before, samples=(*before.samples, after)))
    assert [one.name for one in findings] == found
    assert all("3 requests" in one.evidence[0] for one in findings)
