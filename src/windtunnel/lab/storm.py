"""One storm: victims leave, bystanders ask, later streams are counted, and the metrics are watched until it is quiet.

    baseline → (calm | victims + survivors → bystanders → survivors end) × rounds → quiet, else probe → later streams
        → known answers again → direct check → drain

Calm streams, known answers, the direct check behind a router and the drain are there only when the plan or the target calls for
them.

With `quiet_before_later` off the later streams come at once and quiet is waited for after them.

`run_storm` takes a frozen plan and returns a frozen result. It stops early, with what there is, when `stop` is set or
the plan's duration limit is reached; cancelling it cancels everything it started.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

from windtunnel.lab.arms import unless_stopped
from windtunnel.lab.asks import ID_PREFIX, AskMaker
from windtunnel.lab.baseline import Calibration, calibrate, check_watched, read_baseline
from windtunnel.lab.clients import make_clients
from windtunnel.lab.connection import ConnectionCut, MalformedResponse, fetch
from windtunnel.lab.crowd import Crowd
from windtunnel.lab.extras import Extras
from windtunnel.lab.leave import Gate, Leave
from windtunnel.lab.oracle_check import Known, judge
from windtunnel.lab.plan import (
    Action,
    PlanError,
    Role,
    Shape,
    StormPlan,
    check_plan,
    check_spoken,
    start_offsets,
)
from windtunnel.lab.pulse import Pulse
from windtunnel.lab.quiet import LEAST_SAMPLES, Quiet
from windtunnel.lab.record import Ask, Phase, Sample, StormResult, StreamRecord
from windtunnel.lab.sampler import Sampler, recognise_sources
from windtunnel.lab.server_info import OWNERS, server_info
from windtunnel.lab.session import Session
from windtunnel.lab.states import States
from windtunnel.lab.target import Target
from windtunnel.lab.view import VIEW_EVERY_NS, Seen, StormEvent, StormView

GRACE_FLOOR_NS = 1_000_000_000
STALE_PROBE_TOKENS = 48
"""SGLang writes some gauges every 40 decode steps; a shorter probe leaves them as they were."""


async def run_storm(
    target: Target,
    plan: StormPlan,
    *,
    stop: asyncio.Event | None = None,
    on_event: Callable[[StormEvent], None] | None = None,
    on_view: Callable[[StormView], None] | None = None,
    pid: int | None = None,
) -> StormResult:
    """Raises PlanError for a bad plan, ClientsError for client processes that cannot be had, TargetError when the target does
    not answer a plain request before the storm, and Stopped when it is stopped before it begins.

    `on_view` is told every `VIEW_EVERY_NS` how the storm stands. `pid` is the server's process where it is ours to see; a drain
    needs it.
    """
    check_plan(plan)
    check_spoken(plan, target.origin.scheme)
    if plan.drain and pid is None:
        raise PlanError("drain: needs the id of the server's process: --server-pid")
    stop = stop or asyncio.Event()
    session = Session(target, plan.request_timeout_ns, plan.linger_ns)
    sampler = Sampler(session, await unless_stopped(recognise_sources(target), stop))
    server = await unless_stopped(server_info(target), stop)
    sampler.pid = pid
    session.kind = OWNERS.get(server.get("owned_by", ""), "unknown") if sampler.blind else sampler.kind.name
    storm = _Storm(session, plan, sampler, server, on_event or (lambda _event: None))
    working = asyncio.create_task(storm.run())
    stopping = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(_watch(storm, on_view))
    limit_s = plan.limits.max_duration_ns / 1e9
    try:
        await asyncio.wait({working, stopping}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        early = "stopped" if stopping.done() else f"the duration limit of {limit_s:g} s was reached"
        reason = None if working.done() else early
    finally:
        for task in (working, stopping, watching):
            task.cancel()
        await asyncio.gather(working, stopping, watching, return_exceptions=True)
        await storm.close()
    if reason is None:
        working.result()
    return storm.result(reason)


async def _watch(storm: "_Storm", on_view: Callable[[StormView], None] | None) -> None:
    while on_view is not None:
        on_view(storm.view())
        await asyncio.sleep(VIEW_EVERY_NS / 1e9)


class _Storm:
    """A storm while it runs. Owns phases, notes and what its ends saw; the crowd owns the records. `result` freezes all."""

    def __init__(
        self,
        session: Session,
        plan: StormPlan,
        sampler: Sampler,
        server: Mapping[str, str],
        tell: Callable[[StormEvent], None],
    ) -> None:
        self.server = server
        self.session = session
        self.plan = plan
        self.sampler = sampler
        self.tell = tell
        maker = AskMaker(plan.seed)
        self.crowd = Crowd(session, plan, maker, sampler)
        self._phases: list[Phase] = []
        self.states = States(session, sampler, plan.state_patience_ns)
        self.pulse = Pulse(session.now_ns, session.lags)
        self.extras = Extras(session, plan, maker, self.crowd.streams, sampler)
        self._maker = maker
        self._baseline: Sample | None = None
        self._calibration: Calibration | None = None
        self._quiet_ns: int | None = None
        self._at_deadline: Sample | None = None
        self._after_probe: Sample | None = None
        self._settled: Sample | None = None
        self._acting: list[asyncio.Task[None]] = []
        self._notes: list[str] = []
        self._seen = Seen()

    async def prepare(self) -> None:
        """Calibrate with one plain request, then read the baseline."""
        with self._phase("baseline"):
            self._calibration = await calibrate(self.session, self.plan, self._maker)
            self.crowd.streams += self._calibration.probes
            self.crowd.clients = await make_clients(self.session, self.plan)
            self._baseline = await read_baseline(self.session, self.sampler, self.plan.sample_every_ns)
            self.states.baseline = self._baseline
            if any(trigger.moment.of_target for trigger in self.plan.triggers):
                await self.states.look()
        check_watched(self.session.target, self.sampler, self._baseline)
        if not self._calibration.oracle:
            self._notes.append("the target does not write the oracle's words: texts are not checked")
            await self.extras.learn()
        if not self.sampler.gauges().keys() & self._baseline.gauges.keys():
            self._notes.append("no known gauge on /metrics: leaks cannot be seen; name gauges with --watch")
        elif absent := self.sampler.absent(self._baseline):
            self._notes.append(f"not on the metrics pages, so not watched: {', '.join(absent)}")

    async def run(self) -> None:
        """All of it; the samples and the pulse are taken beside the phases."""
        beside = [asyncio.create_task(self.pulse.run())]
        try:
            await self.prepare()
            beside.append(asyncio.create_task(self.sampler.run(self.plan.sample_every_ns)))
            await self.phases()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def phases(self) -> None:
        round_ = 0
        while round_ < self.plan.rounds or self._soaks():
            arms = [self._round, self._calm] if self.plan.calm else [self._round]
            for arm in Random(self.plan.seed * 1_009 + round_).sample(arms, len(arms)):
                await arm(round_)
            round_ += 1
        if self.plan.quiet_before_later:
            await self._settle()
        if self.plan.later:
            with self._phase("later"):
                asks = [(self.crowd.ask(Role.LATER, self.plan.later_shape), None) for _ in range(self.plan.later)]
                await self.crowd.send(asks, self.plan.later_concurrency)
        if not self.plan.quiet_before_later:
            await self._settle()
        await self._observe()
        await self._after()

    def _soaks(self) -> bool:
        """Whether another round is due by `soak_ns`, and the limit of requests leaves room for it."""
        spent = self.session.opened + self.plan.victims + self.plan.survivors > self.plan.limits.max_requests
        due = self.session.now_ns() < self.plan.soak_ns
        if due and spent:
            self._notes.append("the soak ended early at the limit of requests: raise it with --max-requests")
        return due and not spent

    async def _after(self) -> None:
        """What is looked at once all requests have ended."""
        if not self.sampler.blind:
            await asyncio.sleep(2 * self.plan.sample_every_ns / 1e9)
            taken = await self.sampler.sample()
            self._settled = taken if taken.usable and not taken.clients else None
        await self.extras.ask_again()
        if self.extras.front and not self.sampler.blind:
            self.session.clients += 1  # It asks in a session of its own, and its work must not be nobody's.
            with self._phase("direct"):
                await self.extras.leave_a_worker()
            self.session.clients -= 1
        if self.plan.drain and self.sampler.pid is not None:
            with self._phase("drain"):
                await self.extras.drain(self.sampler.pid)

    async def _calm(self, round_: int) -> None:
        """The survivors' arm without victims."""
        with self._phase("calm"):
            await self.crowd.send(
                [(self.crowd.ask(Role.CALM, self.plan.survivor, round_), None) for _ in range(self.plan.calm)], self.plan.calm
            )

    async def _round(self, round_: int) -> None:
        plan = self.plan
        async with asyncio.TaskGroup() as survivors:
            with self._phase("storm"):
                victims = self._victims(round_)
                for _ in range(plan.survivors):
                    survivors.create_task(self.crowd.follow(self.crowd.ask(Role.SURVIVOR, plan.survivor, round_)))
                await self.crowd.send(victims, plan.victim_concurrency or plan.victims, start_offsets(plan))
            with self._phase("bystanders"):
                await self.crowd.bystander_round(round_)
        if plan.calm and not self.sampler.blind:
            # Survivors may have ended first: what leaving costs the server must not fall on the calm.
            await self.sampler.sample()

    def _victims(self, round_: int) -> list[tuple[Ask, Leave]]:
        """The victims of a round; ways and moments take turns, so that every pair of them comes up."""
        plan = self.plan
        gate = Gate(plan.victims, plan.request_timeout_ns // 2) if plan.hold else None
        out = []
        for index in range(plan.victims):
            how = plan.how[index % len(plan.how)]
            when = plan.triggers[index // len(plan.how) % len(plan.triggers)]
            ask = self.crowd.ask(Role.VICTIM, plan.victim, round_)
            ask = replace(ask, request_id=f"{ID_PREFIX}same-{round_}") if plan.same_id else ask
            out.append((ask, Leave(how, when, self.states.wait, gate, plan.stall_ns)))
        return out

    async def _settle(self) -> None:
        """Wait for quiet; without it, ask once more and see whether the gauges were only stale."""
        if self.sampler.blind:
            return
        assert self._baseline is not None
        quiet = Quiet(self.session, self.plan, self.sampler, self._baseline)
        with self._phase("quiet"):
            came = await quiet.came()
        if came:
            self._quiet_ns = quiet.since_ns()
            return
        self._at_deadline = self.sampler.last_usable()
        with self._phase("probe"):
            await self.crowd.follow(self.crowd.ask(Role.PROBE, Shape(self.plan.api, max_tokens=STALE_PROBE_TOKENS)))
            for _ in range(LEAST_SAMPLES):
                await asyncio.sleep(2 * self.plan.sample_every_ns / 1e9)
                taken = await self.sampler.sample()
                self._after_probe = taken if taken.usable else self.sampler.last_usable()
                if taken.usable and quiet.holds(taken):
                    return

    def _observe_ns(self) -> int:
        """Until the last poll has a sample."""
        polls_ns = self.plan.polls * self.plan.poll_every_ns + 3 * self.plan.sample_every_ns
        return max(self.plan.observe_ns, polls_ns if self.plan.polls else 0)

    async def _observe(self) -> None:
        left = [record.left_ns for record in self.crowd.streams if record.left_ns is not None]
        rest_ns = max(left, default=0) + self._observe_ns() - self.session.now_ns()
        if rest_ns > 0 and left:
            with self._phase("observe"):
                await asyncio.sleep(rest_ns / 1e9)

    async def _act(self, action: Action) -> None:
        await asyncio.sleep(action.after_ns / 1e9)
        origin, status = self.session.target.plain, "no answer"
        try:
            async with asyncio.timeout(self.session.timeout_ns / 1e9):
                answer = await fetch(origin, action.method, action.path, self.session.target.headers)
            status = f"status {answer.status}"
        except (TimeoutError, OSError, ConnectionCut, MalformedResponse) as error:
            status = str(error) or status
        self._notes.append(f"{action.method} {action.path} in phase {action.at}: {status}")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started_ns = self.session.now_ns()
        self.sampler.phase = name
        self.tell(StormEvent(started_ns, name, ""))
        for action in self.plan.actions:
            if action.at == name:
                self._acting.append(asyncio.ensure_future(self._act(action)))
        try:
            yield
        finally:
            self._phases.append(Phase(name, started_ns, self.session.now_ns()))

    def view(self) -> StormView:
        """How the storm stands. Findings are looked for once a phase, because that reads every record."""
        last, base = self.sampler.last_usable(), self._baseline
        if self._seen.due(len(self._phases), len(self.crowd.streams)):
            self._seen.look(self.result(None), settled=self._after_probe is not None or self._quiet_ns is not None)
        gauges = {key: (value, base.gauges.get(key)) for key, value in last.gauges.items()} if last and base else {}
        return StormView(
            at_ns=self.session.now_ns(),
            phase=self.sampler.phase,
            planned=self.plan.requests,
            opened=self.session.opened,
            open_by_stage=dict(self.crowd.clients.stages()),
            ended=dict(Counter(record.end.value for record in self.crowd.streams)),
            bystanders=len(self.crowd.bystanders),
            harmed=sum(one.harmed for one in self.crowd.bystanders),
            gauges=gauges,
            findings=self._seen.findings,
            lost_clients=tuple(self.crowd.clients.lost),
        )

    async def close(self) -> None:
        """End what may still be at work."""
        for task in self._acting:
            task.cancel()
        await asyncio.gather(*self._acting, return_exceptions=True)
        await self.states.close()
        await self.crowd.clients.close()
        await self.session.links.close()

    def result(self, interrupted: str | None) -> StormResult:
        streams = self.crowd.streams
        told = self._calibration
        if told is not None and told.oracle:
            streams = judge(streams, Known(record.ask for record in streams), exact_length=told.exact)
        return self._result(streams, interrupted)

    def _last_notes(self) -> Iterator[str]:
        """What is known only at the end."""
        if self.states.missed:
            yield f"{self.states.missed} victims left without having been seen in the state they waited for"
        if self.sampler.not_numbers:
            names = ", ".join(sorted(self.sampler.not_numbers))
            yield f"{names}: NaN or infinite in some samples, taken as missing there"
        victims = [record for record in self.crowd.streams if record.ask.role is Role.VICTIM]
        if victims and not any(record.left_ns for record in victims):
            yield "no victim left: all had ended before their moment came; raise max_tokens or leave earlier"

    def _result(self, streams: Sequence[StreamRecord], interrupted: str | None) -> StormResult:
        faults = {record.ask.tag: record.fault for record in streams}
        return StormResult(
            plan=self.plan,
            kind=self.session.kind,
            server=self.server,
            cancel_grace_ns=grace_ns(self.sampler.kind.cancel_grace_ns, self.plan.time_scale),
            watches=self.sampler.watches(),
            baseline=self._baseline or Sample(0, "baseline", 0, 0, {}, {}, None, "not read before the storm ended"),
            oracle=self._calibration is not None and self._calibration.oracle,
            streams=tuple(streams),
            bystanders=tuple(replace(one, fault=faults.get(one.tag)) if one.tag else one for one in self.crowd.bystanders),
            samples=tuple(self.sampler.samples),
            phases=tuple(self._phases),
            quiet_ns=self._quiet_ns,
            at_deadline=self._at_deadline,
            after_probe=self._after_probe,
            interrupted=interrupted,
            settled=self._settled,
            known=tuple(self.extras.known),
            direct=self.extras.direct,
            drain=self.extras.drained,
            front=self.extras.front,
            lost_clients=tuple(self.crowd.clients.lost),
            lags=tuple(self.session.lags),
            notes=(*self._notes, *self._last_notes(), *self.session.notes),
        )


def grace_ns(real_ns: int, time_scale: float) -> int:
    """A grace in the target's time. Sockets and schedulers take real time, so a scaled one is never below `GRACE_FLOOR_NS`."""
    return min(real_ns, max(GRACE_FLOOR_NS, round(real_ns / time_scale))) if time_scale > 1 else round(real_ns / time_scale)
