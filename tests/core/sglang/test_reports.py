"""What each kind of report writes, and what it leaves as it was (SGLang 0.5.23, `metrics_reporter.py`)."""

from tests.core.sglang.driving import MS, S, make_engine, request, run

from windtunnel.core.sglang.batch import Batch

DECODE, PREFILL = Batch(False, 0, 0), Batch(True, 0, 0)


def test_a_retraction_shows_in_the_reports_until_the_next_one_of_a_batch() -> None:
    reports = make_engine().reports
    reports.retracted(5)
    reports.retracted(3)
    given = (None, DECODE, None, PREFILL, None)
    assert [reports.make(0, {}, batch).extra["num_retracted_reqs"] for batch in given] == [0, 3, 3, 0, 0]


def test_a_throughput_outlasts_idleness_but_not_thirty_seconds_without_decoding() -> None:
    engine = make_engine(decode_log_interval=1)
    engine.submit([request("a", 8, 100)], 0)
    run(engine, 500 * MS)
    reports, at_ns = engine.reports, engine.clock_ns

    def told(later_ns: int, batch: Batch | None) -> float:
        return reports.make(at_ns + later_ns, {}, batch).extra["gen_throughput"]

    assert told(0, PREFILL) > 0
    assert told(0, None) == 0
    assert told(29 * S, PREFILL) > 0
    assert told(31 * S, PREFILL) == 0


def test_lengths_of_running_requests_come_with_decode_reports_only() -> None:
    engine = make_engine(decode_log_interval=1000)
    engine.submit([request("a", 8, 100)], 0)
    run(engine, 500 * MS)
    reports, at_ns = engine.reports, engine.clock_ns
    before = reports.make(at_ns, {}, DECODE).extra["decode_sum_seq_lens"]
    assert before > 8
    run(engine)
    after = [reports.make(at_ns, {}, batch).extra["decode_sum_seq_lens"] for batch in (PREFILL, None, DECODE)]
    assert after == [before, before, 0]
