"""What may befall an engine of a scenario, as one table of beginnings and ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from windtunnel.sim.engines import Switches
from windtunnel.sim.fabric import Fabric
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.kv_fabric import KvFabric
from windtunnel.sim.network import HEAD_BYTES, Network
from windtunnel.sim.replica import Replica
from windtunnel.sim.router import Router
from windtunnel.sim.scenario import WIRE_FAULTS, FaultSpec, ScenarioError

FOR_EVER_NS = 1 << 62


@runtime_checkable
class Operable(Protocol):
    """What an engine must offer so that an operator's faults can reach it."""

    config: Any

    def kill(self, now_ns: int) -> int: ...

    def freeze(self, until_ns: int) -> None: ...

    def pause(self, mode: Any, now_ns: int) -> int: ...

    def resume(self, now_ns: int) -> None: ...

    def reconfigure(self, config: Any, *, now_ns: int) -> None: ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can sleep; `core.vllm.VllmEngine` does."""

    def sleep(self, level: int, now_ns: int) -> int: ...

    def wake(self, now_ns: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault happens."""

    kernel: Kernel
    replica: Replica
    router: Router
    network: Network
    until_ns: int
    switches: Switches
    wires: Fabric | KvFabric | None
    """Of a prefill or decode worker."""
    spec: FaultSpec

    @property
    def engine(self) -> Operable:
        engine = self.replica.engine
        if not isinstance(engine, Operable):
            raise ScenarioError(f"faults: engine {self.replica.index} cannot be operated")
        return engine

    @property
    def sleeper(self) -> Sleeper:
        engine = self.replica.engine
        assert isinstance(engine, Sleeper), "an engine that cannot sleep"
        return engine

    def mark(self, *, healthy: bool, soon: bool = False) -> None:
        delay_ns = self.network.router_engine_ns(HEAD_BYTES) if soon else self.network.health_interval_ns
        self.router.mark(self.replica.index, healthy=healthy, after_ns=delay_ns)


def plan(spec: FaultSpec, place: Place) -> None:
    """Let it happen, and end, at its times. Raises ScenarioError for what cannot happen to this engine."""
    if spec.kind == "sleep" and not place.switches.sleeps:
        raise ScenarioError(f"faults: engine {spec.engine} cannot sleep")
    begin, end = TABLE[spec.kind]
    place.kernel.at(spec.at, partial(begin, place))
    if end is not None and spec.duration:
        place.kernel.at(place.until_ns, partial(end, place))


def until_ns(spec: FaultSpec) -> int:
    return spec.at + spec.duration if spec.duration else FOR_EVER_NS


def _crash(place: Place) -> None:
    if place.replica.up:
        place.replica.crash()
        place.mark(healthy=False, soon=True)


def _restart(place: Place) -> None:
    place.replica.restart()
    place.mark(healthy=True)


def _kill(place: Place) -> None:
    place.engine.kill(place.kernel.now_ns)
    place.replica.wake()
    place.mark(healthy=False)


def _silence(place: Place) -> None:
    place.replica.set_reachable(False)
    place.mark(healthy=False)


def _heal(place: Place) -> None:
    place.replica.set_reachable(True)
    place.mark(healthy=True)


def _stall(place: Place) -> None:
    place.engine.freeze(place.until_ns)
    place.replica.wake()


def _pause(fault: str, place: Place) -> None:
    place.engine.pause(place.switches.pauses[fault], place.kernel.now_ns)
    place.replica.wake()


def _resume(place: Place) -> None:
    place.engine.resume(place.kernel.now_ns)
    place.replica.wake()


def _sleep(place: Place) -> None:
    place.sleeper.sleep(1, place.kernel.now_ns)
    place.replica.wake()


def _wake(place: Place) -> None:
    place.sleeper.wake(place.kernel.now_ns)
    place.replica.wake()


def _resize(numerator: int, denominator: int, place: Place) -> None:
    config = place.engine.config
    sizes = {name: max(1, getattr(config, name) * numerator // denominator) for name in place.switches.halves}
    place.engine.reconfigure(replace(config, **sizes), now_ns=place.kernel.now_ns)
    place.replica.wake()


def _reset_cache(place: Place) -> None:
    place.switches.reset_cache(place.engine, place.kernel.now_ns)
    place.replica.wake()


def _begin_wire_fault(place: Place) -> None:
    assert place.wires is not None, "a wire fault without a wire"
    place.wires.faults[place.replica.index][place.spec.kind] = place.spec


def _end_wire_fault(place: Place) -> None:
    assert place.wires is not None, "a wire fault without a wire"
    active = place.wires.faults[place.replica.index]
    if active.get(place.spec.kind) is place.spec:
        del active[place.spec.kind]


TABLE: Mapping[str, tuple[Callable[[Place], None], Callable[[Place], None] | None]] = {
    "crash": (_crash, _restart),
    "kill": (_kill, _restart),
    "silent": (_silence, _heal),
    "stall": (_stall, None),
    "pause": (partial(_pause, "pause"), _resume),
    "pause_wait": (partial(_pause, "pause_wait"), _resume),
    "pause_abort": (partial(_pause, "pause_abort"), _resume),
    "sleep": (_sleep, _wake),
    "shrink": (partial(_resize, 1, 2), partial(_resize, 2, 1)),
    "reset_cache": (_reset_cache, None),
    **dict.fromkeys(WIRE_FAULTS, (_begin_wire_fault, _end_wire_fault)),
}
