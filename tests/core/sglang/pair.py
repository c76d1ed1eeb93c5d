"""A prefill and a decode worker in virtual time, with a wire between them that takes `wire_ns` for everything."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any

from tests.core.sglang.driving import PACING, request

from windtunnel.core.engine import Engine
from windtunnel.core.outputs import StepOutput, StepStats, TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.disagg.decode import DecodeWorker
from windtunnel.core.sglang.disagg.prefill import PrefillWorker
from windtunnel.core.sglang.disagg.topology import Topology
from windtunnel.core.sglang.profiles import profile
from windtunnel.core.transfer.backends import SimBackend
from windtunnel.core.transfer.frames import DpRankQuery, Frame, LateWrite, Outgoing, RegisterDpRank, TopologyQuery
from windtunnel.core.units import MS

BOOTSTRAP = ("10.0.0.1", 8998)
ADDRESS = "10.0.0.1:8998"
_ENGINE = {"max_total_num_tokens": 2048, "page_size": 4, "chunked_prefill_size": 64, "max_running_requests": 16}
_DISAGG_FIELDS = set(DisaggConfig.__dataclass_fields__)


class Pair:
    """`settings` go to whichever configuration knows them; `prefill_…` and `decode_…` to one side only."""

    def __init__(
        self,
        version: str = "0.5.23",
        *,
        ranks: tuple[int, int] = (1, 1),
        wire_ns: int = MS,
        switches: dict[str, Any] | None = None,
        make_backend: Callable[[int], SimBackend] | None = None,
        pacing: Pacing = PACING,
        **settings: Any,
    ) -> None:
        switches = {"profile": replace(profile(version), **(switches or {}))}
        ports = (
            [f"10.0.0.1:{9000 + rank}" for rank in range(ranks[0])],
            [f"10.0.0.2:{7000 + rank}" for rank in range(ranks[1])],
        )
        self.backends = [make_backend(rank) if make_backend else SimBackend() for rank in range(ranks[0])]
        p_engine, p_disagg = _split("prefill_", settings)
        d_engine, d_disagg = _split("decode_", settings)
        self.prefill = PrefillWorker(
            SglangEngineConfig(**{**_ENGINE, **p_engine}),
            DisaggConfig(endpoints=tuple(ports[0]), **{**switches, **p_disagg}),
            pacing,
            Random(1),
            self.backends.__getitem__,
        )
        self.decode = DecodeWorker(
            SglangEngineConfig(**{**_ENGINE, **d_engine}),
            DisaggConfig(endpoints=tuple(ports[1]), num_reserved_decode_tokens=16, **{**switches, **d_disagg}),
            pacing,
            Random(1),
        )
        self.workers: dict[str, Any] = {"prefill": self.prefill, "decode": self.decode}
        self.topology: Topology | None = Topology(ranks[0], 1, {(0, rank): endpoint for rank, endpoint in enumerate(ports[0])})
        self.sockets = {endpoint: (self.prefill, rank) for rank, endpoint in enumerate(ports[0])} | {
            endpoint: (self.decode, rank) for rank, endpoint in enumerate(ports[1])
        }
        self.registered: dict[int, int] = {}
        self.now_ns = 0
        self.wire_ns = wire_ns
        self.deliver: Callable[[Frame], bool] = lambda _frame: True
        """False: the wire loses this frame."""
        self.frames: list[tuple[int, Outgoing]] = []
        """Everything sent, with the time."""
        self.steps: dict[str, list[StepOutput]] = {"prefill": [], "decode": []}
        self.late_writes: list[LateWrite] = []
        self._wire: list[tuple[int, int, Callable[[int], None]]] = []
        self._sent = 0
        self._rooms = 0

    # Driving

    def submit(
        self, name: str, prompt: Any = 100, tokens: int = 4, room: int | None = None, *, legs: str = "pd", **more: Any
    ) -> None:
        self._rooms += 1
        room = 1000 + self._rooms if room is None else room
        item = self.leg(name, prompt, tokens, room, **more)
        for leg, worker in (("p", self.prefill), ("d", self.decode)):
            if leg in legs:
                assert worker.submit([item], self.now_ns) is None
        self._collect()

    def leg(self, name: str, prompt: Any, tokens: int, room: int, **more: Any) -> EngineRequest:
        return request(name, prompt, tokens, bootstrap=(*BOOTSTRAP, room), **more)

    def abort(self, name: str, *, legs: str = "pd", notify: bool = True) -> None:
        for leg, worker in (("p", self.prefill), ("d", self.decode)):
            if leg in legs:
                worker.abort([name], self.now_ns, notify=notify)
        self._collect()

    def run(self, until_ns: int | None = None, stop: Callable[[], bool] | None = None) -> None:
        """Event by event; the integrity of both workers is checked after each."""
        for _ in range(200_000):
            at = self._next_at()
            if stop is not None and stop():
                return
            if at is None or (until_ns is not None and at > until_ns):
                self.now_ns = max(self.now_ns, until_ns or 0)
                return
            self.now_ns = max(self.now_ns, at)
            self._turn()
        raise AssertionError("the pair does not come to rest")

    def _next_at(self) -> int | None:
        times = [worker.next_event_at() for worker in self.workers.values()]
        times.append(self._wire[0][0] if self._wire else None)
        return min((at for at in times if at is not None), default=None)

    def _turn(self) -> None:
        while self._wire and self._wire[0][0] <= self.now_ns:
            heappop(self._wire)[2](self.now_ns)
        for name, worker in self.workers.items():
            self.steps[name] += worker.advance(self.now_ns)
            worker.check_integrity()
        self._collect()

    def _collect(self) -> None:
        self.late_writes += self.decode.take_late_writes()
        for worker in self.workers.values():
            for outgoing in worker.take_outgoing():
                self.frames.append((self.now_ns, outgoing))
                if self.deliver(outgoing.frame):  # type: ignore[arg-type]
                    self._post(outgoing)

    def _post(self, outgoing: Outgoing) -> None:
        self._sent += 1
        heappush(self._wire, (self.now_ns + self.wire_ns, self._sent, lambda now_ns: self._arrive(outgoing, now_ns)))

    def _arrive(self, outgoing: Outgoing, now_ns: int) -> None:
        frame = outgoing.frame
        if isinstance(frame, TopologyQuery):
            self.decode.topology(frame.address, self.topology, now_ns)
        elif isinstance(frame, DpRankQuery):
            known = {room: self.registered[room] for room in frame.rooms if room in self.registered}
            self.decode.dp_ranks(frame.address, known, now_ns)
        elif isinstance(frame, RegisterDpRank):
            self.registered[frame.room] = frame.dp_rank
        else:
            worker, rank = self.sockets[outgoing.to]
            worker.receive(frame, now_ns, rank)

    # Looking

    def outputs(self, side: str, name: str) -> list[TokenOutput]:
        return [output for step in self.steps[side] for output in step.outputs if output.request_id == name]

    def tokens(self, side: str, name: str) -> list[int]:
        return [token for output in self.outputs(side, name) for token in output.token_ids]

    def ending(self, side: str, name: str) -> TokenOutput:
        (last,) = [output for output in self.outputs(side, name) if output.finish_reason is not None]
        return last

    def ended_at(self, side: str, name: str) -> int:
        (at,) = [
            step.at_ns
            for step in self.steps[side]
            for output in step.outputs
            if output.request_id == name and output.finish_reason is not None
        ]
        return at

    def status_of(self, side: str, name: str) -> tuple[str, int]:
        """(finish reason, HTTP status) of the end."""
        end = self.ending(side, name)
        assert end.finish_reason is not None
        return end.finish_reason.value, 200 if end.error is None else end.error.status

    def stats(self, side: str) -> Sequence[StepStats]:
        return [step.stats for step in self.steps[side] if step.stats is not None]

    def gauge(self, side: str, stem: str) -> float:
        return self.stats(side)[-1].extra[stem]

    def frames_of(self, kind: type) -> list[Any]:
        return [outgoing.frame for _at, outgoing in self.frames if isinstance(outgoing.frame, kind)]

    def assert_empty(self, **leaks: int) -> None:
        """Both workers hold nothing, but for `leaks` (prefill_rooms=1, …)."""
        for name, worker in self.workers.items():
            held = {f"{name}_{key}": count for key, count in worker.outstanding().items() if count}
            assert held == {key: count for key, count in leaks.items() if key.startswith(name) and count}


def _split(prefix: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    engine: dict[str, Any] = {}
    disagg: dict[str, Any] = {}
    other = {"prefill_": "decode_", "decode_": "prefill_"}[prefix]
    for key, value in settings.items():
        if key.startswith(other) and key not in _DISAGG_FIELDS:
            continue
        name = key.removeprefix(prefix) if key not in _DISAGG_FIELDS else key
        (disagg if name in _DISAGG_FIELDS else engine)[name] = value
    return engine, disagg


__all__ = ["ADDRESS", "BOOTSTRAP", "Engine", "Pair"]
