"""The table of workload kinds."""

from collections.abc import Callable, Mapping
from random import Random

from windtunnel.sim.scenario import WorkloadSpec
from windtunnel.sim.traces import Replay
from windtunnel.sim.workload import ClosedLoop, MultiTurn, OpenLoop, Workload

Make = Callable[[WorkloadSpec, Callable[[str], Random], int], Workload]
KINDS: Mapping[str, Make] = {
    "poisson": OpenLoop,
    "constant": OpenLoop,
    "gamma": OpenLoop,
    "onoff": OpenLoop,
    "closed": ClosedLoop,
    "multiturn": MultiTurn,
    "trace": Replay,
}


def make_workload(spec: WorkloadSpec, stream: Callable[[str], Random], until_ns: int) -> Workload:
    """Raises ScenarioError for a trace that cannot be read."""
    return KINDS[spec.kind](spec, stream, until_ns)
