"""Findings that need a router, a transfer queue, a process or a known answer."""

import asyncio
import json
import signal
from dataclasses import replace

import jsonschema
import pytest
from tests.lab.fake_server import FakeServer
from tests.lab.test_client import DONE, FINISH, HEAD, TEXT, chunked
from tests.lab.test_client import END as TERMINATOR
from tests.lab.test_findings import PLAN, blow, names
from tests.own_time import own_time

from windtunnel.core.units import MS, S
from windtunnel.lab.asks import AskMaker
from windtunnel.lab.document import storm_report
from windtunnel.lab.extras import Extras
from windtunnel.lab.findings import find
from windtunnel.lab.plan import Role, Shape
from windtunnel.lab.proxy import Proxy
from windtunnel.lab.record import DrainRecord, End, KnownPair, Sample, StormResult
from windtunnel.lab.report import schema
from windtunnel.lab.sampler import Sampler
from windtunnel.lab.session import Session
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target


@pytest.mark.parametrize(("keep", "expected"), [(True, ["abort_not_propagated"]), (False, [])])
async def test_a_proxy_that_keeps_its_upstream_is_told_from_one_that_does_not(keep: bool, expected: list[str]) -> None:
    worker = FakeServer(itl_s=0.005)
    port = await worker.start()
    front = await asyncio.start_server(Proxy(port, keep_upstream=keep).serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}"
    plan = replace(PLAN, bystanders=0, survivors=0, later=2, victim=Shape(max_tokens=400), quiet_deadline_ns=10 * S)
    try:
        with own_time(asyncio.get_running_loop()):
            result = await run_storm(make_target(url, "fake", metrics_urls=[f"http://127.0.0.1:{port}/metrics"]), plan)
    finally:
        front.close()
        await worker.stop()
    assert result.front and result.direct is not None
    assert names(find(result)) == expected
    during = [sample for sample in result.samples if sample.phase == "direct"]
    assert during and all(sample.clients for sample in during), "the lab's own request was taken for nobody's"


def stuck(result: StormResult, key: str, watch: str) -> StormResult:
    """The same storm, but this gauge stays two above its baseline, and a probe is answered."""
    end_ns = max(sample.at_ns for sample in result.samples) + 1
    last = Sample(end_ns, "quiet", 0, result.samples[-1].opened, {**result.samples[-1].gauges, key: 2.0}, {})
    probe = next(one for one in result.streams if one.ask.role is Role.PROBE)
    probe = replace(probe, started_ns=end_ns + 1, ended_ns=end_ns + 2)
    return replace(
        result,
        watches={**result.watches, key: watch},
        samples=(*result.samples, last),
        streams=(*result.streams, probe),
        quiet_ns=None,
        settled=None,
        at_deadline=last,
        after_probe=replace(last, at_ns=end_ns + 3, phase="probe"),
    )


async def test_what_is_stuck_is_named_after_its_queue() -> None:
    result = await blow(PLAN)
    assert names(find(stuck(result, "num_prefill_inflight_queue_reqs", "queue"))) == ["transfer_orphan"]
    assert names(find(stuck(result, "num_decode_prealloc_queue_reqs", "queue"))) == ["queue_orphan"]
    assert names(find(stuck(result, "running", "running"))) == ["gauge_drift"]
    unanswered = stuck(result, "waiting", "waiting")
    last = replace(unanswered.streams[-1], end=End.ERROR_STATUS, status=500)
    assert "queue_orphan" in names(find(unanswered))
    assert "queue_orphan" not in names(find(replace(unanswered, streams=(*unanswered.streams[:-1], last))))


async def test_drains_known_answers_and_the_document() -> None:
    result = await blow(PLAN)
    assert find(replace(result, drain=DrainRecord(4, 0, 2 * S, 10 * S, {"finished": 4}))) == ()
    assert names(find(replace(result, drain=DrainRecord(4, 1, None, 10 * S, {"finished": 3})))) == ["drain_timeout"]
    assert find(replace(result, known=(KnownPair(1, ("a", "b"), ("a", "b")),))) == ()
    assert names(find(replace(result, known=(KnownPair(1, ("a", "b"), ("a", "c")),)))) == ["corrupt_stream"]
    document = storm_report(make_target("http://127.0.0.1:1", "fake", headers={"authorization": "Bearer fake"}), result)
    assert document["model"] == "<removed>"  # the key, wherever it turns up
    jsonschema.Draft202012Validator(schema("storm")).validate(json.loads(json.dumps(document)))


async def test_a_drain_begins_when_its_streams_are_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the server takes to begin them; and they are read to their ends when its process has ended."""
    loop, begin, end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        loop.call_later(0.2, begin.set)
        await begin.wait()
        writer.write(HEAD + chunked(TEXT))
        await end.wait()
        writer.write(chunked(FINISH, DONE) + TERMINATOR)
        writer.close()

    def term(pid: int, number: int) -> None:
        assert begin.is_set() and (pid, number) == (7, signal.SIGTERM)

    def alive(_pid: int) -> bool:
        loop.call_later(0.2, end.set)
        return False

    monkeypatch.setattr("windtunnel.lab.extras.os.kill", term)
    monkeypatch.setattr("windtunnel.lab.extras.alive", alive)
    plan = replace(PLAN, drain=4, sample_every_ns=MS, victim=Shape(max_tokens=2))
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        session = Session(make_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m"), 60 * S, 0)
        extras = Extras(session, plan, AskMaker(0), [], Sampler(session, []))
        await extras.drain(7)
    assert extras.drained is not None
    assert (extras.drained.streams, extras.drained.unended, extras.drained.by_end) == (4, 0, {"finished": 4})
