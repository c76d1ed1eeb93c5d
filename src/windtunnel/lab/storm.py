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
from itertools import count
from random import Random

from windtunnel.lab.arms import unless_stopped
from windtunnel.lab.asks import ID_PREFIX, AskMaker
from windtunnel.lab.client import Gate, Leave, Session, described, run_request
from windtunnel.lab.clients import Clients, LocalClients, make_clients
from windtunnel.lab.connection import ConnectionCut, How, MalformedResponse, fetch
from windtunnel.lab.extras import Extras
from windtunnel.lab.oracle_check import Known, check_text, judge
from windtunnel.lab.outlived import watched_ns
from windtunnel.lab.plan import (
    Action,
    BystanderKind,
    PlanError,
    Role,
    Shape,
    StormPlan,
    check_plan,
    check_spoken,
    start_offsets,
)
from windtunnel.lab.pulse import Pulse
from windtunnel.lab.record import Ask, BystanderRecord, End, Phase, Sample, StormResult, StreamRecord
from windtunnel.lab.sampler import Sampler, is_quiet, recognise_sources
from windtunnel.lab.server_info import OWNERS, server_info
from windtunnel.lab.states import States
from windtunnel.lab.target import SettingError, Target, TargetError
from windtunnel.lab.view import VIEW_EVERY_NS, Seen, StormEvent, StormView

BASELINE_SAMPLES = 3
GRACE_FLOOR_NS = 1_000_000_000
QUIET_SAMPLES = 2
"""So many samples in a row must be quiet."""
LEAST_SAMPLES = 8
"""The wait for quiet, and the look after a probe, do not end before so many: a busy machine takes few in the time."""
PATIENCE = 4
"""The wait for quiet does end after so many times its time, or `LEAST_PATIENCE_NS`, whatever was sampled."""
LEAST_PATIENCE_NS = 10_000_000_000
PROBE_TOKENS = 12
STALE_PROBE_TOKENS = 48
"""SGLang writes some gauges every 40 decode steps; a shorter probe leaves them as they were."""
PROBE_ATTEMPTS = 3
_MODELS_PATH = "/v1/models"
"""What a bystander gets instead of `/metrics` where there are none."""


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


def planned_asks(plan: StormPlan) -> Iterator[Ask]:
    """All generation requests of a plan, in the order in which they are made; the same seed makes the same ones."""
    maker = AskMaker(plan.seed)
    yield maker.ask(Role.PROBE, 0, Shape(max_tokens=PROBE_TOKENS))
    for round_ in range(plan.rounds):
        for _ in range(plan.calm):
            yield maker.ask(Role.CALM, round_, plan.survivor)
        for _ in range(plan.victims):
            yield maker.ask(Role.VICTIM, round_, plan.victim)
        for _ in range(plan.survivors):
            yield maker.ask(Role.SURVIVOR, round_, plan.survivor)
    for _ in range(plan.later):
        yield maker.ask(Role.LATER, 0, plan.later_shape)


class _Storm:
    """A storm while it runs. Owns all records until `result` freezes them."""

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
        self.maker = AskMaker(plan.seed)
        self.streams: list[StreamRecord] = []
        self.bystanders: list[BystanderRecord] = []
        self._phases: list[Phase] = []
        self.states = States(session, sampler, plan.state_patience_ns)
        self.pulse = Pulse(session.now_ns, session.lags)
        self.extras = Extras(session, plan, self.maker, self.streams, sampler)
        self.clients: Clients = LocalClients(session)
        self._next_bystander = count()
        self._baseline: Sample | None = None
        self._oracle = False
        self._exact = False
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
            await self._calibrate()
            self.clients = await make_clients(self.session, self.plan)
            self._baseline = self.states.baseline = await self._read_baseline()
            if any(trigger.moment.of_target for trigger in self.plan.triggers):
                await self.states.look()
        self._check_watched(self._baseline)
        if not self._oracle:
            await self.extras.learn()
        if not self.sampler.gauges().keys() & self._baseline.gauges.keys():
            self._notes.append("no known gauge on /metrics: leaks cannot be seen; name gauges with --watch")
        elif absent := self.sampler.absent(self._baseline):
            self._notes.append(f"not on the metrics pages, so not watched: {', '.join(absent)}")

    def _check_watched(self, baseline: Sample) -> None:
        """Raises SettingError for a gauge that was asked for and that no page shows, not even as NaN."""
        target = self.session.target
        seen = baseline.gauges.keys() | self.sampler.not_numbers
        absent = [name for name in target.watch if name not in seen]
        if absent:
            pages = ", ".join(url.shown for url in target.metrics)
            told = f"{', '.join(absent)}: not on {pages}; write the gauge's full name as it stands there"
            raise SettingError("--watch", "watch", told)

    async def _read_baseline(self) -> Sample:
        """The last usable one of a few samples; an empty one when there are no metrics."""
        if self.sampler.blind:
            return Sample(self.session.now_ns(), "baseline", 0, self.session.opened, {}, {}, None, "no metrics")
        for _ in range(BASELINE_SAMPLES):
            await asyncio.sleep(self.plan.sample_every_ns / 1e9)
            await self.sampler.sample()
        last = self._last_usable()
        if last is None:
            raise TargetError(f"no metrics could be read before the storm: {self.sampler.samples[-1].error}")
        return last

    async def _calibrate(self) -> None:
        """Ask plainly, again when the answer is not the oracle's: a target may answer every second request wrongly."""
        probes: list[StreamRecord] = []
        while len(probes) < PROBE_ATTEMPTS and not (probes and _speaks_oracle(probes[-1])):
            probes.append(await run_request(self.session, self._ask(Role.PROBE, Shape(max_tokens=PROBE_TOKENS))))
        self.streams += probes
        last = probes[-1]
        if not any(probe.end is End.FINISHED for probe in probes):
            raise TargetError(
                f"{self.session.target.origin.url} does not answer a plain stream: {last.end.value}, {last.error}"
            )
        self._exact = len(last.words) == last.ask.max_tokens
        self._oracle = self.plan.oracle == "on" or (self.plan.oracle == "auto" and _speaks_oracle(last))
        if not self._oracle:
            self._notes.append("the target does not write the oracle's words: texts are not checked")

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
                asks = [(self._ask(Role.LATER, self.plan.later_shape), None) for _ in range(self.plan.later)]
                await self._crowd(asks, self.plan.later_concurrency)
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
            await self._crowd(
                [(self._ask(Role.CALM, self.plan.survivor, round_), None) for _ in range(self.plan.calm)], self.plan.calm
            )

    async def _round(self, round_: int) -> None:
        plan = self.plan
        async with asyncio.TaskGroup() as survivors:
            with self._phase("storm"):
                victims = self._victims(round_)
                for _ in range(plan.survivors):
                    survivors.create_task(self._follow(self._ask(Role.SURVIVOR, plan.survivor, round_)))
                await self._crowd(victims, plan.victim_concurrency or plan.victims, start_offsets(plan))
            with self._phase("bystanders"):
                await self._bystander_round(round_)
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
            ask = self._ask(Role.VICTIM, plan.victim, round_)
            ask = replace(ask, request_id=f"{ID_PREFIX}same-{round_}") if plan.same_id else ask
            out.append((ask, Leave(how, when, self.states.wait, gate, plan.stall_ns)))
        return out

    async def _bystander_round(self, round_: int) -> None:
        """This round's share of the bystanders, by a few clients that each ask one after the other."""
        share = self.plan.bystanders * (round_ + 1) // self.plan.rounds - self.plan.bystanders * round_ // self.plan.rounds
        todo = iter(range(share))

        async def one_client() -> None:
            for _ in todo:
                await self._bystander()
                await asyncio.sleep(self.plan.bystander_gap_ns / 1e9)

        await _all([asyncio.create_task(one_client()) for _ in range(min(share, self.plan.bystander_concurrency))])

    async def _bystander(self) -> None:
        kinds = self.plan.bystander_kinds
        kind = kinds[next(self._next_bystander) % len(kinds)]
        one = await (self._bystander_get(kind) if kind.shape is None else self._bystander_generation(kind))
        if one is not None:
            self.bystanders.append(one)

    async def _bystander_get(self, kind: BystanderKind) -> BystanderRecord:
        session = self.session
        sent_ns, status, error = session.now_ns(), None, None
        base = session.target.metrics[0]
        path = _MODELS_PATH if kind.path == "/metrics" and self.sampler.blind else kind.path or base.path
        try:
            async with asyncio.timeout(session.timeout_ns / 1e9):
                headers = session.target.headers_for(base.origin)
                answer = await fetch(base.origin, "GET", base.request_path if path == "/metrics" else path, headers)
            status = answer.status
            error = "an empty body" if status == 200 and not answer.body else None
        except TimeoutError:
            error = "no answer in time"
        except (OSError, ConnectionCut, MalformedResponse) as failure:
            error = str(failure)
        return BystanderRecord(kind.name, sent_ns, session.now_ns(), kind.expect_status, status, error)

    async def _bystander_generation(self, kind: BystanderKind) -> BystanderRecord | None:
        """None when the client process that asked is gone: what the server did is not known."""
        assert kind.shape is not None
        ask = self._ask(Role.BYSTANDER, kind.shape)
        record = await self.clients.run(ask)
        wrong = record.end is not End.FINISHED and record.status == kind.expect_status == 200
        error = record.error if record.status is None or wrong else None
        self.streams.append(record)
        if record.end is End.CLIENT_DIED:
            return None
        return BystanderRecord(kind.name, record.started_ns, record.ended_ns, kind.expect_status, record.status, error, ask.tag)

    async def _crowd(
        self, asks: Sequence[tuple[Ask, Leave | None]], concurrency: int, offsets: Sequence[int] | None = None
    ) -> None:
        """All of `asks`, by so many clients that each send one after the other, none before its offset."""
        begun_ns = self.session.now_ns()
        todo = iter(zip(asks, offsets or [0] * len(asks), strict=True))

        async def one_client() -> None:
            for (ask, leave), offset_ns in todo:
                early_ns = begun_ns + offset_ns - self.session.now_ns()
                if early_ns > 0:
                    await asyncio.sleep(early_ns / 1e9)
                await self._follow(ask, leave)

        await _all([asyncio.create_task(one_client()) for _ in range(min(len(asks), concurrency))])

    async def _follow(self, ask: Ask, leave: Leave | None = None) -> None:
        record = await self.clients.run(ask, leave)
        self.streams.append(record)
        if leave is not None and leave.how is How.TIMEOUT_RETRY and record.end is End.LEFT:
            await self._retry(ask, replace(leave, gate=None))

    async def _retry(self, ask: Ask, leave: Leave) -> None:
        """All further attempts leave like the first, except the last, which stays."""
        for left in reversed(range(self.plan.retries)):
            again = self.maker.again(ask, Role.VICTIM if left else Role.RETRY)
            record = await self.clients.run(again, leave if left else None)
            self.streams.append(record)
            if record.end is not End.LEFT:
                return

    async def _settle(self) -> None:
        """Wait for quiet; without it, ask once more and see whether the gauges were only stale."""
        if self.sampler.blind:
            return
        if await self._quiet():
            self._quiet_ns = self._quiet_at()
            return
        self._at_deadline = self._last_usable()
        with self._phase("probe"):
            await self._follow(self._ask(Role.PROBE, Shape(max_tokens=STALE_PROBE_TOKENS)))
            for _ in range(LEAST_SAMPLES):
                await asyncio.sleep(2 * self.plan.sample_every_ns / 1e9)
                taken = await self.sampler.sample()
                self._after_probe = taken if taken.usable else self._last_usable()
                if taken.usable and self._is_quiet(taken):
                    return

    async def _quiet(self) -> bool:
        """Whether the samples became quiet before the deadline, which is in witnessed time (`outlived`)."""
        with self._phase("quiet"):
            began_ns, wait_ns = self.session.now_ns(), self.plan.quiet_deadline_ns
            patience_ns = max(PATIENCE * wait_ns, LEAST_PATIENCE_NS) if wait_ns else 0
            seen = len(self.sampler.samples)
            while (waited_ns := self.session.now_ns() - began_ns) < patience_ns:
                if waited_ns >= wait_ns and self._looked_for_quiet(seen, began_ns):
                    break
                recent = self.sampler.samples[seen:][-QUIET_SAMPLES:]
                if len(recent) == QUIET_SAMPLES and all(self._is_quiet(sample) for sample in recent):
                    return True
                await asyncio.sleep(self.plan.sample_every_ns / 2e9)
        return False

    def _looked_for_quiet(self, seen: int, began_ns: int) -> bool:
        """Whether the samples after the first `seen` bear witness to all of the wait."""
        times = [sample.at_ns for sample in self.sampler.samples]
        watched = watched_ns(times, began_ns, self.plan.sample_every_ns)
        return len(times) - seen >= LEAST_SAMPLES and watched >= self.plan.quiet_deadline_ns

    def _is_quiet(self, sample: Sample) -> bool:
        assert self._baseline is not None
        return is_quiet(sample, self._baseline, self.sampler.watches())

    def _quiet_at(self) -> int:
        """The first of the quiet samples at the end of the series."""
        at_ns = self.session.now_ns()
        for sample in reversed(self.sampler.samples):
            if not self._is_quiet(sample):
                break
            at_ns = sample.at_ns
        return at_ns

    def _observe_ns(self) -> int:
        """Until the last poll has a sample."""
        polls_ns = self.plan.polls * self.plan.poll_every_ns + 3 * self.plan.sample_every_ns
        return max(self.plan.observe_ns, polls_ns if self.plan.polls else 0)

    async def _observe(self) -> None:
        left = [record.left_ns for record in self.streams if record.left_ns is not None]
        rest_ns = max(left, default=0) + self._observe_ns() - self.session.now_ns()
        if rest_ns > 0 and left:
            with self._phase("observe"):
                await asyncio.sleep(rest_ns / 1e9)

    def _last_usable(self) -> Sample | None:
        return next((sample for sample in reversed(self.sampler.samples) if sample.usable), None)

    def _ask(self, role: Role, shape: Shape, round_: int = 0) -> Ask:
        return self.maker.ask(role, round_, shape)

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
        last, base = self._last_usable(), self._baseline
        if self._seen.due(len(self._phases), len(self.streams)):
            self._seen.look(self.result(None), settled=self._after_probe is not None or self._quiet_ns is not None)
        gauges = {key: (value, base.gauges.get(key)) for key, value in last.gauges.items()} if last and base else {}
        return StormView(
            at_ns=self.session.now_ns(),
            phase=self.sampler.phase,
            planned=self.plan.requests,
            opened=self.session.opened,
            open_by_stage=dict(self.clients.stages()),
            ended=dict(Counter(record.end.value for record in self.streams)),
            bystanders=len(self.bystanders),
            harmed=sum(one.harmed for one in self.bystanders),
            gauges=gauges,
            findings=self._seen.findings,
            lost_clients=tuple(self.clients.lost),
        )

    async def close(self) -> None:
        """End what may still be at work."""
        for task in self._acting:
            task.cancel()
        await asyncio.gather(*self._acting, return_exceptions=True)
        await self.states.close()
        await self.clients.close()
        await self.session.links.close()

    def result(self, interrupted: str | None) -> StormResult:
        streams = self.streams
        if self._oracle:
            streams = judge(streams, Known(record.ask for record in streams), exact_length=self._exact)
        return self._result(streams, interrupted)

    def _last_notes(self) -> Iterator[str]:
        """What is known only at the end."""
        if self.states.missed:
            yield f"{self.states.missed} victims left without having been seen in the state they waited for"
        if self.sampler.not_numbers:
            names = ", ".join(sorted(self.sampler.not_numbers))
            yield f"{names}: NaN or infinite in some samples, taken as missing there"
        victims = [record for record in self.streams if record.ask.role is Role.VICTIM]
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
            oracle=self._oracle,
            streams=tuple(streams),
            bystanders=tuple(replace(one, fault=faults.get(one.tag)) if one.tag else one for one in self.bystanders),
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
            lost_clients=tuple(self.clients.lost),
            lags=tuple(self.session.lags),
            notes=(*self._notes, *self._last_notes(), *self.session.notes),
        )


def _speaks_oracle(probe: StreamRecord) -> bool:
    fault = check_text(probe.ask.tag, probe.words, Known([probe.ask]), whole=None)
    return probe.end is End.FINISHED and fault is None and bool(probe.words)


def grace_ns(real_ns: int, time_scale: float) -> int:
    """A grace in the target's time. Sockets and schedulers take real time, so a scaled one is never below `GRACE_FLOOR_NS`."""
    return min(real_ns, max(GRACE_FLOOR_NS, round(real_ns / time_scale))) if time_scale > 1 else round(real_ns / time_scale)


async def _all(tasks: list["asyncio.Task[None]"]) -> None:
    """Wait for all; when this is cancelled, so are they."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def describe(target: Target, plan: StormPlan) -> str:
    """What a dry run prints: the plan and one request of each role, as they would be sent."""
    lines = [
        f"{plan.requests} requests to {target.origin.url}, at most {plan.concurrency} at once",
        f"{plan.rounds} × ({plan.victims} victims leaving by {', '.join(how.value for how in plan.how)} when {plan.when}"
        f" + {plan.survivors} survivors), {plan.bystanders} bystanders, {plan.later} later streams",
    ]
    seen: set[Role] = set()
    for ask in planned_asks(plan):
        if ask.role not in seen:
            seen.add(ask.role)
            lines.append(f"{ask.role.value}: {described(target, ask)}")
    return "\n".join(lines)
