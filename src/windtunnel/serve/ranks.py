"""Data-parallel ranks: several engines in one process, and which of them gets a prompt (vLLM's internal load balancing).

vLLM 0.33 (`v1/engine/core_client.py`, `DPLBAsyncMPClient`) gives a request to the rank with the lowest 4 x waiting + running,
the first one among equals. It knows these counts from reports every 100 ms and adds its own choices in between. A request
may name its rank (`X-data-parallel-rank`), which adds nothing to a count. All choices of one prompt stay together here; vLLM
places each of them.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

from windtunnel.core.outputs import Refusal, StepOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.units import MS
from windtunnel.serve.clock import now_ns
from windtunnel.serve.driver import EngineDriver, Listener, StepObserver
from windtunnel.serve.telemetry import Metrics

WAITING_WEIGHT = 4
REPORT_INTERVAL_NS = 100 * MS


class Placer(Protocol):
    """Which rank gets a request that names none. Observes the steps of all ranks."""

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None: ...

    def choose(self, request: EngineRequest, now_ns: int) -> int:
        """Asked for the first choice of each prompt, or, if `by_choice`, for every one."""
        ...

    by_choice: bool


class Balancer:
    """Observes the steps of all ranks; owns what the front end believes of their queues."""

    by_choice = False

    def __init__(self, ranks: int) -> None:
        self._reported = [(0, 0)] * ranks
        self._believed = [[0, 0] for _ in range(ranks)]
        self._taken_ns: int | None = None

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        if step.stats is not None:
            self._reported[rank] = (step.stats.waiting + step.stats.deferred, step.stats.running)

    def choose(self, _request: EngineRequest, now_ns: int) -> int:
        """The rank for one more prompt; from now on it counts as waiting there."""
        if self._taken_ns is None or now_ns - self._taken_ns >= REPORT_INTERVAL_NS:
            self._taken_ns = now_ns
            self._believed = [list(counts) for counts in self._reported]
        rank = min(range(len(self._believed)), key=self._score)
        self._believed[rank][0] += 1
        return rank

    def _score(self, rank: int) -> int:
        waiting, running = self._believed[rank]
        return WAITING_WEIGHT * waiting + running


class Ranks:
    """The drivers of all ranks, as one. `drivers[i]` is rank i."""

    def __init__(self, drivers: Sequence[EngineDriver], placer: Placer, metrics: Metrics) -> None:
        self.drivers = tuple(drivers)
        self._placer = placer
        self._metrics = metrics

    @property
    def steps(self) -> int:
        return sum(driver.steps for driver in self.drivers)

    def observe(self, observer: StepObserver) -> None:
        """One more observer of every rank's steps; they carry their rank."""
        for driver in self.drivers:
            driver.observe(observer)

    def submit(self, requests: Sequence[EngineRequest], listeners: Sequence[Listener]) -> Refusal | None:
        """Admit all or none; see `EngineDriver.submit`."""
        placed: list[tuple[EngineDriver, list[EngineRequest]]] = []
        for driver, group, heard_by in self._placements(requests, listeners):
            refusal = driver.submit(group, heard_by)
            if refusal is not None:
                for other, admitted in placed:
                    other.abort([request.request_id for request in admitted])
                return refusal
            placed.append((driver, group))
        for driver, group in placed:
            self._metrics.on_submitted(driver.rank, group)
        return None

    def _placements(
        self, requests: Sequence[EngineRequest], listeners: Sequence[Listener]
    ) -> Iterator[tuple[EngineDriver, list[EngineRequest], list[Listener]]]:
        """Each prompt with its rank; one group of everything when there is one rank."""
        if len(self.drivers) == 1:
            yield self.drivers[0], list(requests), list(listeners)
            return
        together = _itself if self._placer.by_choice else _prompt_of
        for _prompt, pairs in groupby(zip(requests, listeners, strict=True), key=together):
            group, heard_by = zip(*pairs, strict=True)
            asked = group[0].data_parallel_rank
            rank = self._placer.choose(group[0], now_ns()) if asked is None else asked
            yield self.drivers[rank], list(group), list(heard_by)

    def abort(self, request_ids: Sequence[str], *, notify: bool = False) -> int:
        """End these requests on whichever rank they are; other ranks notice nothing."""
        return sum(driver.abort(request_ids, notify=notify) for driver in self.drivers)

    def live(self, request_id: str) -> bool:
        """Somebody still waits for outputs of this request."""
        return any(driver.hears(request_id) for driver in self.drivers)

    def wake(self) -> None:
        for driver in self.drivers:
            driver.wake()

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()


def _itself(pair: tuple[EngineRequest, Listener]) -> str:
    return pair[0].request_id


def _prompt_of(pair: tuple[EngineRequest, Listener]) -> str:
    return pair[0].parent_id or pair[0].request_id
