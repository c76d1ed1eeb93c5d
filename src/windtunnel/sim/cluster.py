"""A whole cluster in virtual time: builds the parts of a scenario, runs them, and sums up."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from windtunnel.core.engine import Engine
from windtunnel.core.units import S
from windtunnel.core.vllm.connector.config import MOONCAKE
from windtunnel.sim import faults
from windtunnel.sim.calls import Call
from windtunnel.sim.clients import Clients
from windtunnel.sim.engines import Build, check_ranks, connector_of, kind_of, make_pacing
from windtunnel.sim.fabric import Fabric
from windtunnel.sim.kernel import Kernel
from windtunnel.sim.kv_fabric import KvFabric
from windtunnel.sim.mooncake import MooncakeRouter
from windtunnel.sim.network import Network
from windtunnel.sim.pairs import PairRouter
from windtunnel.sim.policies import NEED_KV_EVENTS, PolicyContext, load_pair_policy, load_policy
from windtunnel.sim.replica import Replica
from windtunnel.sim.results import Recorder, conservation, distribution
from windtunnel.sim.router import OneRouter
from windtunnel.sim.scenario import EnginesSpec, FaultSpec, Scenario, ScenarioError
from windtunnel.sim.sidecar import SidecarRouter
from windtunnel.sim.timeline import Timeline
from windtunnel.sim.workload import Question
from windtunnel.sim.workloads import make_workload


@dataclass(frozen=True, slots=True)
class RunResult:
    """`summary` is plain JSON; the rest is for files."""

    summary: dict[str, Any]
    rows: Sequence[str]
    metrics: Sequence[bytes]
    """Prometheus text of each engine; empty where there is none."""
    recorder: Recorder
    timeline: Timeline


class Cluster:
    """One run of one scenario. Owns everything in it."""

    def __init__(self, scenario: Scenario, *, keep_rows: bool = True, kv_events: bool = False) -> None:
        """`kv_events`: collect them even if the policy has no use for them."""
        self.scenario = scenario
        self.kernel = Kernel(scenario.seed)
        self.recorder = Recorder(scenario.slo, keep_rows=keep_rows)
        self.timeline = Timeline(scenario.timeline_requests)
        self.specs: list[EnginesSpec] = [spec for spec in scenario.engines for _ in range(spec.count)]
        network = Network(scenario.network, self.kernel.stream("network"))
        self._kv_events = kv_events or scenario.policy in NEED_KV_EVENTS or scenario.policy_file is not None
        self.fabric = self._fabric(network)
        self.router = self._router(network)
        self.replicas = [self._replica(index, spec) for index, spec in enumerate(self.specs)]
        self.router.replicas = self.replicas
        if self.fabric is not None:
            self.fabric.replicas = self.replicas
        self.clients = Clients(scenario.clients, self.kernel, network, self.router, self._ended)
        self.router.client = self.clients
        self.workload = make_workload(scenario.workload, self.kernel.stream, scenario.duration)
        self._arrivals = self.workload.arrivals()
        for fault in scenario.faults:
            faults.plan(fault, self._place(fault, network))

    def _fabric(self, network: Network) -> Fabric | KvFabric | None:
        """The wires between prefill and decode workers. Raises ScenarioError for workers of two kinds."""
        if not self.scenario.disaggregated:
            return None
        kinds = {spec.kind for spec in self.specs}
        if len(kinds) > 1:
            raise ScenarioError(f"engines: prefill and decode are {', '.join(sorted(kinds))}: must be of one kind")
        if kinds == {"vllm"}:
            check_ranks(self.specs)
            return KvFabric(self.kernel, network, self.specs)
        return Fabric(self.kernel, network, self.specs, self.scenario.duration)

    def _router(self, network: Network) -> OneRouter | PairRouter:
        scenario, roles = self.scenario, [spec.role for spec in self.specs]
        hasher = kind_of(self.specs[0]).hasher(self.specs[0])
        context = PolicyContext(self.kernel.stream("policy"), hasher, len(self.specs))
        if self.fabric is None:
            policy = load_policy(scenario.policy, scenario.policy_file, context)
            return OneRouter(self.kernel, network, policy, roles)
        pairs = load_pair_policy(scenario.policy, scenario.policy_file, context, roles)
        if isinstance(self.fabric, KvFabric):
            kind = MooncakeRouter if connector_of(self.specs) == MOONCAKE else SidecarRouter
            return kind(self.kernel, network, pairs, roles, scenario.pd, self.fabric)
        return PairRouter(self.kernel, network, pairs, roles, scenario.pd, self.fabric)

    def _place(self, fault: FaultSpec, network: Network) -> faults.Place:
        switches = kind_of(self.specs[fault.engine]).switches
        replica, until_ns = self.replicas[fault.engine], faults.until_ns(fault)
        return faults.Place(self.kernel, replica, self.router, network, until_ns, switches, self.fabric, fault)

    def _replica(self, index: int, spec: EnginesSpec) -> Replica:
        kind, fabric = kind_of(spec), self.fabric
        draws = self.kernel.stream(f"engine.{index}")
        build = Build(spec, make_pacing(spec.pacing, draws), self._kv_events, self.kernel.stream(f"scheduler.{index}"))
        metrics = kind.metrics(spec, lambda: self.kernel.now_ns / S) if self.scenario.metrics else None

        def make() -> Engine:
            if fabric is None:
                return kind.make(build)
            return kind.make(build._replace(endpoints=fabric.start(index), fate=fabric.fate_of(index)))

        replica = Replica(index, self.kernel, make, self.router, metrics, spec.frontend)
        if fabric is not None:
            replica.on_turn = fabric.on_turn
        if self._kv_events:
            replica.on_kv_events = self.router.on_kv_events
        if self.timeline.limit:
            replica.on_transitions = self.timeline.fold
        return replica

    # The run

    def run(self) -> RunResult:
        self.start()
        with _rare_collections():
            self.kernel.run(until_ns=self.scenario.duration + self.scenario.drain)
        return self.finish()

    def start(self) -> None:
        self._next_arrival()

    def _next_arrival(self) -> None:
        following = next(self._arrivals, None)
        if following is not None:
            at_ns, question = following
            self.kernel.at(at_ns, partial(self._arrive, question))

    def _arrive(self, question: Question) -> None:
        self.clients.ask(question)
        self._next_arrival()

    def _ended(self, call: Call) -> None:
        self.recorder.add(call)
        answered = len(call.winner.times_ns) if call.outcome == "finished" and call.winner is not None else None
        following = self.workload.after(call.question, self.kernel.now_ns, answered)
        if following is not None:
            at_ns, question = following
            self.kernel.at(at_ns, partial(self.clients.ask, question))

    # The end

    def check(self) -> dict[str, int]:
        """Conservation on both sides and the integrity of every engine. Raises AssertionError."""
        for replica in self.replicas:
            replica.check()
        return conservation(self.clients.sent, self.recorder.outcomes, len(self.clients.live))

    def finish(self) -> RunResult:
        self.recorder.flush()
        counts = self.check()
        texts = [b"" if replica.metrics is None else replica.metrics.store.text() for replica in self.replicas]
        return RunResult(self._summary(counts), self.recorder.rows, texts, self.recorder, self.timeline)

    def _summary(self, counts: dict[str, int]) -> dict[str, Any]:
        recorder, clients = self.recorder, self.clients
        span_ns = max(self.scenario.duration if self.scenario.workload.requests is None else 0, recorder.last_end_ns, 1)
        hours = span_ns / S / 3600
        gpu_hours = hours * sum(spec.gpus for spec in self.specs)
        outcomes = clients.attempt_outcomes
        return {
            "seed": self.scenario.seed,
            "policy": self.scenario.policy if self.scenario.policy_file is None else "file",
            "virtual_s": round(span_ns / S, 6),
            "requests": counts,
            "attempts": {
                **conservation(clients.attempts, outcomes, clients.attempts - sum(outcomes.values())),
                "retries": clients.retries,
                "hedges": clients.hedges,
            },
            "ttft": distribution(recorder.ttft_ns),
            "tpot": distribution(recorder.tpot_ns),
            "itl": recorder.gaps.summary(),
            "e2e": distribution(recorder.e2e_ns),
            "throughput": {
                "requests_per_s": round(counts["finished"] / (span_ns / S), 4),
                "output_tokens_per_s": round(recorder.output_tokens / (span_ns / S), 2),
            },
            "goodput": {
                "good": recorder.good,
                "share": round(recorder.good / counts["sent"], 6) if counts["sent"] else 0.0,
                "requests_per_s": round(recorder.good / (span_ns / S), 4),
            },
            "cost": {
                "gpu_hours": round(gpu_hours, 6),
                "gpu_seconds_per_good_request": round(gpu_hours * 3600 / recorder.good, 4) if recorder.good else None,
            },
            "prefix_cache": {"prompt_tokens": recorder.prompt_tokens, "cached_tokens": recorder.cached_tokens},
            **self._pd_summary(),
            "engines": [self._engine_summary(replica) for replica in self.replicas],
            "events": self.kernel.events,
        }

    def _pd_summary(self) -> dict[str, Any]:
        if not isinstance(self.router, PairRouter) or self.fabric is None:
            return {}
        return {"pd": {"legs": self.router.leg_counts(), "wires": dict(sorted(self.fabric.counts.items()))}}

    def _engine_summary(self, replica: Replica) -> dict[str, Any]:
        return {
            "engine": replica.index,
            "role": self.specs[replica.index].role,
            "routed": self.router.routed[replica.index],
            "steps": replica.steps,
            "peak_running": replica.peak_running,
            "peak_waiting": replica.peak_waiting,
            "sequences": replica.ledger.counts(),
        }


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A run makes few circles and many objects: looking for circles at the usual pace costs a sixth of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def run(scenario: Scenario, *, keep_rows: bool = True) -> RunResult:
    """Raises ScenarioError for a scenario that cannot be, AssertionError if anything was lost on the way."""
    return Cluster(scenario, keep_rows=keep_rows).run()
