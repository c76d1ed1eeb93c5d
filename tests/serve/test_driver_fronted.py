"""A live driver with a profile plays what the replay plays: the same chunks at the same times, under the test's clock."""

import random
from dataclasses import dataclass, field, replace

import pytest
from tests.serve.test_driver_turns import FakeAlarm, FakeCork, FakeLoop

from windtunnel.core.machine import Machine, OtherJobs
from windtunnel.core.outputs import TokenOutput
from windtunnel.core.profile import FrontendCosts, Noise, Profile, ProfilePacing, StepCosts
from windtunnel.core.request import EngineRequest
from windtunnel.core.sources import SequenceSource
from windtunnel.core.units import MS, US
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig
from windtunnel.serve import driver as module
from windtunnel.serve.driver import EngineDriver
from windtunnel.sim.calibrate.measured import Measured, Run
from windtunnel.sim.calibrate.replay import EngineLimits, replay

SEED = 11
LATE_NS = 200 * US
"""As much as deadlines that follow a turn of the driver wait for one another."""
BUSY_FRONTEND = Profile(
    StepCosts(2e6, 5_000.0, 100_000.0),
    FrontendCosts(1.5e6, 0.0, 300_000.0, 400_000.0, 300_000.0, 500_000.0, 0.5, 4),
    Noise((0.0, 0.5, 0.99, 1.0), (-200_000.0, 0.0, 400_000.0, 3e6)),
)
"""Eight streams need 3.5 ms of the front end for a step of under 3 ms: it merges chunks."""
BESIDE_JOBS = replace(BUSY_FRONTEND, machine=Machine(cores=2, engine_cores=1.4))
ASKED = [Measured(0.004 * at, 64, 20, ((1.0, 1),), 1.0) for at in range(12)]


class TurningClock:
    """The driver's loop, alarm and clock in one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, profile: Profile = BUSY_FRONTEND, other_cores: float = 0.0) -> None:
        self.now = 0
        self.alarm, self.loop = FakeAlarm(), FakeLoop()
        monkeypatch.setattr(module, "now_ns", lambda: self.now)
        monkeypatch.setattr(module, "make_alarm", lambda _loop, _callback: self.alarm)
        draws = random.Random(SEED)
        pacing = ProfilePacing(profile, draws, OtherJobs((other_cores,)))
        self.engine = VllmEngine(VllmEngineConfig(num_blocks=200, block_size=16, max_model_len=512), pacing)
        self.driver = EngineDriver(self.engine, 0, self.loop, FakeCork(), ())  # type: ignore[arg-type]
        self.driver._auditor = IdleAuditor()  # type: ignore[assignment]
        self.driver.front(pacing, draws)

    def run_until(self, until_ns: int) -> None:
        """Let everything happen whose time comes before."""
        while True:
            self.driver.wake()
            if self.loop.soon:
                self.loop.soon = 0
            elif self.alarm.times and self.now < self.alarm.times[-1] < until_ns:
                self.now = self.alarm.times[-1]
            else:
                self.now = until_ns
                return
            self.driver._run()


class IdleAuditor:
    def idle(self) -> None:
        """The books are looked at by the test."""


@dataclass
class Client:
    """Keeps the times of what it gets, as the replay does."""

    clock: TurningClock
    sent_ns: int
    chunks: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)

    def on_output(self, output: TokenOutput) -> None:
        made = self.chunks[-1][1] if self.chunks else 0
        self.chunks.append((self.clock.now - self.sent_ns, made + len(output.token_ids)))
        self.outputs.append(output)

    def broken(self) -> None:
        raise AssertionError("a listener broke")


def send(clock: TurningClock, name: str, prompt: int = 64, tokens: int = 20) -> Client:
    source = SequenceSource((0,), ignore_eos=True)
    own = 1000 * len(name) + 20 * sum(name.encode())
    request = EngineRequest(name, tuple(range(own, own + prompt)), source, tokens, clock.now, ignore_eos=True)
    client = Client(clock, clock.now)
    assert clock.driver.submit([request], [client]) is None
    return client


@pytest.mark.parametrize(("profile", "other_cores"), [(BUSY_FRONTEND, 0.0), (BESIDE_JOBS, 0.7)])
def test_live_chunks_are_those_of_the_replay(monkeypatch: pytest.MonkeyPatch, profile: Profile, other_cores: float) -> None:
    clock = TurningClock(monkeypatch, profile, other_cores)
    clients = []
    for at, asked in enumerate(ASKED):
        clock.run_until(round(1e9 * asked.sent_s))
        clients.append(send(clock, f"r{at}"))
    clock.run_until(10**12)
    run = Run("open", None, ASKED, other_jobs=((1.0, other_cores),))
    played = replay(run, profile, EngineLimits(), seed=SEED).requests
    by_sending = sorted(played, key=lambda one: one.sent_s)
    assert any(len(client.chunks) < 20 for client in clients), "nothing was merged: the load shows nothing"
    for client, replayed in zip(clients, by_sending, strict=True):
        assert [tokens for _at, tokens in client.chunks] == [tokens for _at, tokens in replayed.chunks]
        for (live_ns, _), (replay_ms, _) in zip(client.chunks, replayed.chunks, strict=True):
            assert -1 <= live_ns - replay_ms * MS <= LATE_NS + 1
    clock.engine.check_integrity()
    assert not clock.engine.live()


def test_a_front_end_that_is_taken_away_lets_everything_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = TurningClock(monkeypatch)
    clients = [send(clock, f"r{at}") for at in range(6)]
    clock.run_until(30 * MS)
    late = send(clock, "late")
    before = sum(tokens for client in clients for _at, tokens in client.chunks[-1:])
    clock.driver.front(StepPacing(), random.Random(0))  # type: ignore[arg-type]
    assert sum(tokens for client in clients for _at, tokens in client.chunks[-1:]) > before
    clock.run_until(10**12)
    assert all(client.chunks[-1][1] == 20 for client in [*clients, late])
    assert not clock.engine.live()


class StepPacing:
    """Any pacing without a front end."""


def test_an_aborted_stream_hears_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = TurningClock(monkeypatch)
    gone, other, waiting = (send(clock, name) for name in ("gone", "other", "waiting"))
    clock.run_until(20 * MS)
    heard = list(gone.chunks)
    assert clock.driver.abort(["gone", "unknown"]) == 1
    last = send(clock, "last")
    assert clock.driver.abort(["last"]) == 1
    clock.run_until(10**12)
    assert gone.chunks == heard and not last.chunks
    assert other.chunks[-1][1] == waiting.chunks[-1][1] == 20
    clock.engine.check_integrity()
    assert not clock.engine.live() and clock.driver._machine.next_event_at() is None
