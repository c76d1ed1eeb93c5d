"""The mechanism of `pd-abort-storm` in virtual time (SGLang reference §1.6, endings 1 and 2)."""

from random import Random

import pytest
from tests.core.sglang.driving import MS, PACING, S, request, run
from tests.core.sglang.pair import BOOTSTRAP

from windtunnel.core.outputs import StepOutput
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.disagg.config import FAKE_HOST, DisaggConfig
from windtunnel.core.sglang.disagg.prefill import PrefillWorker
from windtunnel.core.sglang.profiles import profile
from windtunnel.core.transfer.backends import Fate, SimBackend
from windtunnel.core.transfer.frames import Abort, Metadata
from windtunnel.core.transfer.status import KVPoll
from windtunnel.core.transfer.worker import Action

QUEUES = 32
PIN_ROOM = 1
PROMPT = 300
PIN_PORT = 7031
"""The persistent pin's decode rank: its worker is lost to everybody."""


class _Storm:
    """A prefill worker, thirty clients, and decode ranks behind as many ports as there are queues."""

    def __init__(self, version: str, *, gap: str = "promote_gap_ns") -> None:
        stall = Fate("stall")
        self.backend = SimBackend(fate=lambda write: stall if write.chunk.room == PIN_ROOM else Fate())
        disagg = DisaggConfig(
            profile=profile(version),
            endpoints=("10.0.0.1:9000",),
            transfer_queues=QUEUES,
            **{gap: 5 * MS},
            abort_loses_peer=True,
            metadata_slots=256,
        )
        engine = SglangEngineConfig(
            max_total_num_tokens=65536, page_size=4, chunked_prefill_size=512, max_running_requests=128, overlap=True
        )
        self.worker = PrefillWorker(engine, disagg, PACING, Random(1), lambda _rank: self.backend)
        self.now_ns = 0
        self.steps: list[StepOutput] = []
        self._rounds = 0

    def run(self, until_ns: int) -> None:
        self.steps += run(self.worker, until_ns)
        self.now_ns = until_ns
        self.worker.take_outgoing()

    def submit(self, name: str, room: int, prompt: int, port: int = 7000) -> None:
        self.worker.submit([request(name, prompt, 1, bootstrap=(*BOOTSTRAP, room))], self.now_ns)
        pages = tuple(range(-(-prompt // 4)))
        self.worker.receive(Metadata(room, f"10.0.0.2:{port}", pages, 1, 0, 1), self.now_ns)

    def pin(self) -> None:
        """A request whose handle never settles, there before the storm."""
        self.submit("pin", PIN_ROOM, 100, PIN_PORT)
        self.run(S)

    def round(self) -> None:
        """Thirty multi-chunk prompts at once, all aborted while the second batch runs."""
        self._rounds += 1
        rooms = range(100 * self._rounds, 100 * self._rounds + 30)
        for room in rooms:
            self.submit(f"r{room}", room, PROMPT, 7000 + 10 * (self._rounds - 1) + room % 10)
        self.run(self.now_ns + 17 * MS)
        self.worker.abort([f"r{room}" for room in rooms], self.now_ns)
        self._decode_aborts(rooms)
        self.run(self.now_ns + 200 * MS)

    def _decode_aborts(self, rooms: range) -> None:
        """The decode legs' ABORT frames, in releases that have them."""
        if self.worker.profile.decode_sends_abort:
            for room in rooms:
                self.worker.receive(Abort(room, f"10.0.0.2:{7000 + room % 10}"), self.now_ns + MS)

    def probe(self) -> float:
        """A health probe through the fake peer, as an orchestrator sends: its prefill report refreshes the gauges."""
        name = f"HEALTH_CHECK{self.now_ns}"
        self.worker.submit([request(name, 1, 1, bootstrap=(FAKE_HOST, None, 0))], self.now_ns)
        self.run(self.now_ns + S)
        reports = [step.stats for step in self.steps if step.stats is not None]
        return reports[-1].extra["num_prefill_inflight_queue_reqs"]

    @property
    def failed(self) -> int:
        return self.worker.counters()["num_transfer_failed_reqs_total"]


def _classic_run(version: str, **settings: str) -> tuple[float, list[float], int, int, _Storm]:
    """(baseline, gauge at five polls 12 s apart, failures by the end of the storm, failures at the last poll, storm)."""
    storm = _Storm(version, **settings)
    storm.pin()
    baseline = storm.probe()
    for _ in range(3):
        storm.round()
    at_once = storm.failed
    storm_end_ns = storm.now_ns
    series = []
    for poll in range(1, 6):
        storm.run(storm_end_ns + 12 * poll * S - S)
        series.append(storm.probe())
    return baseline, series, at_once, storm.failed, storm


@pytest.mark.parametrize("version", ["0.5.12", "0.5.15"])
def test_with_the_race_pins_stay_30_s_and_leave_as_failed_transfers(version: str) -> None:
    baseline, series, at_once, failed, storm = _classic_run(version)
    pins = series[0] - baseline
    assert baseline == 1
    assert pins >= 3
    assert at_once == 0
    assert series == [baseline + pins, baseline + pins, baseline, baseline, baseline]
    assert failed == pins
    assert list(storm.worker.sequences) == ["pin"]
    assert storm.worker.live()[0].resources["status"] == ["TRANSFERRING"]


def test_pinned_requests_hold_slots_rows_and_locked_pages() -> None:
    storm = _Storm("0.5.12")
    storm.round()
    held = storm.worker.outstanding()
    pins = len(storm.worker.sequences)
    assert pins >= 3
    assert held["metadata_slots"] == held["rows"] == pins
    assert held["locked_pages"] == PROMPT // 4 * pins
    views = storm.worker.live()
    assert {(view.resources["queue"], *view.resources["status"]) for view in views} == {("inflight", "TRANSFERRING")}


@pytest.mark.parametrize("version", ["0.5.16", "0.5.20", "0.5.23"])
def test_with_a_sticky_failure_the_gauge_is_back_at_once(version: str) -> None:
    baseline, series, _at_once, failed, storm = _classic_run(version)
    assert series == [baseline] * 5 == [1] * 5
    assert failed == storm.failed
    assert list(storm.worker.sequences) == ["pin"]


def test_the_window_inside_the_update_is_left_in_every_release_and_the_latch_narrows_it() -> None:
    """From 0.5.22 on the poll reads the latch of an AbortReq; an abort by the decode sets none (reference §1.3)."""
    pins = {}
    for version in ("0.5.16", "0.5.21", "0.5.22", "0.5.23"):
        baseline, series, _at_once, _failed, _storm = _classic_run(version, gap="write_gap_ns")
        pins[version] = series[0] - baseline
    assert pins["0.5.16"] == pins["0.5.21"] > pins["0.5.22"] == pins["0.5.23"] > 0


@pytest.mark.parametrize("version", ["0.5.12", "0.5.20"])
def test_the_forced_race_needs_no_timing(version: str) -> None:
    """Held between its check and its update, the worker stores Transferring over the abort's Failed under rule (c), not (e)."""
    storm = _Storm(version)
    (rank,) = storm.worker.ranks
    for worker in rank.workers:
        worker.hold_before = frozenset({Action.READ})
    storm.submit("a", 5, 100)
    storm.run(100 * MS)
    (worker,) = [worker for worker in rank.workers if worker.action is Action.READ]
    storm.worker.freeze(S)
    storm.worker.abort(["a"], storm.now_ns)
    assert rank.table.get(5) is KVPoll.FAILED
    assert [worker.step(storm.now_ns) for _ in range(2)] == [Action.READ, Action.WRITE]
    assert rank.table.get(5) is (KVPoll.TRANSFERRING if version == "0.5.12" else KVPoll.FAILED)


def test_an_aborted_room_whose_transfer_completes_answers_200_length() -> None:
    """Ending 1: the last chunk completes, and the cancelled request answers as if nothing had happened."""
    storm = _Storm("0.5.12")
    backend: SimBackend = storm.backend
    backend.abandon = lambda room, now_ns: None  # type: ignore[method-assign]
    storm.submit("a", 5, 100)
    storm.submit("b", 6, 1000)
    storm.run(17 * MS)
    storm.worker.abort(["a"], storm.now_ns, notify=True)
    storm.run(S)
    ends = [output for step in storm.steps for output in step.outputs if output.request_id == "a"]
    assert [end.finish_reason.value for end in ends if end.finish_reason] == ["length"]
