"""The lab tested blind: one battery of storms over servers with a planted defect and over as many clean ones.

Whoever judges a server (`examine`) is given its addresses, its process and a seed, nothing else. The order of servers is
drawn from the seed, and every server with a defect has a twin without it. A defect is *found* when anything is found, and
*named right* when the finding that its catalogue entry names is among those that no other one explains. On a clean server every
finding is a false alarm.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from windtunnel.core.units import MS, S
from windtunnel.lab.arms import Stopped, running, unless_stopped
from windtunnel.lab.connection import How
from windtunnel.lab.experiment_file import Arm, Environment
from windtunnel.lab.finding import Finding
from windtunnel.lab.findings import find
from windtunnel.lab.plan import COMPLETION_BYSTANDER, METRICS_BYSTANDER, Api, BystanderKind, Moment, Shape, StormPlan, Trigger
from windtunnel.lab.sampler import ScrapeError, scrape
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import Target, TargetError, find_context, find_model, make_target

CLEAN = "clean"
SERVE = "{python} -m windtunnel serve --engine vllm --model windtunnel --ttft 10ms --itl 4ms"
COMMAND = f"{SERVE} --port {{port}}"
FRONT = "{python} -m windtunnel.lab.proxy --port {port} --upstream-port {port2}"
WORKER = f"-- {SERVE} --port {{port2}}"
LONG_PROMPT_SHARE = 0.7
"""Of the context that the server advertises: such a prompt must be served."""

_QUICK = StormPlan(
    victims=8,
    hold=True,
    victim=Shape(max_tokens=600),
    survivor=Shape(max_tokens=40),
    later=4,
    sample_every_ns=20 * MS,
    quiet_deadline_ns=1_500 * MS,
    request_timeout_ns=3 * S,
    linger_ns=200 * MS,
    bystanders=8,
)
_CHAT = Shape(Api.CHAT, max_tokens=600)
BATTERY: tuple[tuple[str, StormPlan], ...] = (
    ("crowd", replace(_QUICK, how=(How.FIN, How.RST), survivors=3, bystanders=16, later=6)),
    (
        "everybody leaves",
        replace(_QUICK, how=(How.RST, How.HALF_CLOSE), victim=_CHAT, bystanders=0, later_shape=Shape(Api.CHAT)),
    ),
    (
        "unary",
        replace(
            _QUICK,
            victim=Shape(max_tokens=600, stream=False),
            when=Trigger(Moment.DECODE, 0),
            bystanders=4,
            bystander_kinds=(METRICS_BYSTANDER,),
            later_shape=Shape(stream=False),
        ),
    ),
    ("children", replace(_QUICK, victim=Shape(max_tokens=600, n=2), how=(How.FIN, How.STOP_READING), stall_ns=100 * MS)),
    (
        "pairs",
        replace(
            _QUICK,
            victims=8,
            rounds=14,  # the test needs ten pairs, and on a busy machine some are lost
            victim=Shape(max_tokens=100),
            survivors=2,
            calm=2,
            survivor=Shape(max_tokens=70),  # so that they are still there when the victims have left
            bystanders=0,
            later=2,
            sample_every_ns=50 * MS,
        ),
    ),
    ("long prompt", replace(_QUICK, victims=2, when=Trigger(Moment.SENT, 0), survivors=1, bystanders=4)),
)


_REFUSED = BystanderKind("too long", shape=Shape(max_tokens=4_000, stream=False), expect_status=400)
_LONG = BystanderKind("long", shape=Shape(prompt_words=300, max_tokens=8, stream=False))
_PAIR = replace(_QUICK, how=(How.FIN, How.RST), sample_every_ns=40 * MS, request_timeout_ns=6 * S)
_LEAVING_EARLY = replace(
    _PAIR,
    victims=5,
    hold=False,
    when=Trigger(Moment.AFTER, 0, 2_500 * MS),
    victim=Shape(prompt_words=200, max_tokens=200),
    bystanders=0,
    later=2,
    later_concurrency=1,
    quiet_before_later=False,
    quiet_deadline_ns=3 * S,
    request_timeout_ns=30 * S,
)
"""Prompts that fill a prefill batch of a second each; whoever leaves does so in the middle of a later one.

SGLang shows its queues with the next prefill batch only, so the later streams come one after the other.
"""
_LEAVING_DURING_A_READ = replace(
    _PAIR,
    victims=4,
    when=Trigger(Moment.TRANSFER, 0),
    victim=Shape(prompt_words=200, max_tokens=32),
    bystanders=6,
    bystander_kinds=(_LONG,),
    bystander_concurrency=6,
    later=2,
)
_REFUSALS = replace(
    _PAIR, victims=0, bystanders=4, bystander_kinds=(COMPLETION_BYSTANDER, _REFUSED), later=0, quiet_deadline_ns=3 * S
)
PAIR_BATTERIES: Mapping[str, tuple[tuple[str, StormPlan], ...]] = MappingProxyType(
    {
        "vllm:nixl_num_kv_expired_reqs_total": (
            ("leaving during a read", _LEAVING_DURING_A_READ),
            ("refused", _REFUSALS),
        ),
        "sglang:num_prefill_inflight_queue_reqs": (("leaving early", _LEAVING_EARLY),),
    }
)
"""In place of the battery, for a target whose metrics have this series: it is a P/D pair."""


@dataclass(frozen=True, slots=True)
class Case:
    """One planted defect, the finding that it must raise, and the command of its twin."""

    fault: str
    finding: str
    command: str = ""
    """With the defect; empty: the plain server with `--fault`."""
    clean: str = COMMAND
    workers: int = 0
    """So many servers stand behind a proxy, or a balancer, which is what is asked."""

    def arm(self, *, planted: bool, env: Mapping[str, str] = MappingProxyType({})) -> Arm:
        planted_command = self.command or f"{COMMAND} --fault {self.fault} {MORE_FLAGS.get(self.fault, '')}".strip()
        return Arm(command=planted_command if planted else self.clean, ready_url=READY, env=dict(env))


class Turn(NamedTuple):
    """One server of the schedule."""

    case: Case
    planted: bool
    seed: int


MORE_FLAGS = {"engine-death": "--watchdog-interval 60s"}
"""The watchdog would end the server during the battery, or not, as the machine has time: then it is `unreachable`."""
READY = "http://127.0.0.1:{port}/health"
_UP = "{python} -m windtunnel up PRESET --port {port} --worker-port prefill={port2} --worker-port decode={port3} --liveness 0s"
VLLM_PAIR = (
    f"{_UP.replace('PRESET', 'vllm-pd')} --args '--time-scale 30 --num-gpu-blocks-override 130 --max-model-len 2048'"
    " --args '--no-enable-prefix-caching --watchdog-interval 1h' --args 'decode:--transfer-latency 12s'"
)
"""A lease takes a second, a read 0.4 s, and whoever comes next gets the blocks of whoever has left."""
SGLANG_PAIR = (
    f"{_UP.replace('PRESET', 'sglang-pd')} --args '--time-scale 30 --sglang-profile 0.5.12'"
    " --args 'prefill:--pacing step --step-base 30s --step-prefill-token 0s --step-decode-seq 0s'"
    " --args 'prefill:--chunked-prefill-size -1 --max-prefill-tokens 256'"
    " --args 'prefill:--disaggregation-queue-size 128 --transfer-latency 0s --transfer-dead-peer 1000h'"
    " --args 'decode:--itl 150ms --disaggregation-listen-sockets 96'"
)
"""A batch of the prefill takes a second and one of the prompts; a lost peer is not reported during the battery."""
FURTHER = (
    Case("proxy-keeps-upstream", "abort_not_propagated", f"{FRONT} --keep-upstream {WORKER}", f"{FRONT} {WORKER}", workers=1),
    Case("shutdown-hangs", "drain_timeout", f"{COMMAND} --shutdown-outcome hang"),
    *(
        Case(fault, finding, f"{VLLM_PAIR} --args '{role}:--fault {fault}'", VLLM_PAIR, workers=2)
        for fault, finding, role in (
            ("load-into-freed-blocks", "corrupt_stream", "decode"),
            ("load-end-forgotten", "kv_leak", "decode"),
            ("late-load-kills-engine", "wedged", "decode"),
            ("notified-by-own-id", "lease_expired", "decode"),
            ("refusal-tells-nobody", "lease_expired", "decode"),
        )
    ),
    Case(
        "transfer-race",
        "transfer_orphan",
        f"{SGLANG_PAIR} --args 'prefill:--fault transfer-race:999999us peer-lost-on-abort'",
        SGLANG_PAIR,
        workers=2,
    ),
)
"""Defects that a flag or a process beside the server makes."""
DRAIN = replace(_QUICK, victims=0, bystanders=0, later=1, drain=4, drain_deadline_ns=4 * S, request_timeout_ns=15 * S)


@dataclass(frozen=True, slots=True)
class Seen:
    """One finding, and how long after the server was ready its storm had ended."""

    finding: Finding
    storm: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One server, examined. `case` is None for a clean one; it is looked at only when everything is over."""

    case: Case | None
    seed: int
    seen: tuple[Seen, ...]
    seconds: float
    unusable: str | None = None
    """Why the battery could not be ended: the server stopped answering, or did not start."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of what no other finding of its storm explains."""
        return tuple(dict.fromkeys(one.finding.name for one in self.seen if one.finding.consequence_of is None))

    @property
    def consequences(self) -> tuple[str, ...]:
        """Of what was explained wherever it was found."""
        return tuple(dict.fromkeys(one.finding.name for one in self.seen if one.finding.name not in self.names))

    def seconds_to(self, name: str) -> float | None:
        return next((one.seconds for one in self.seen if one.finding.name == name and one.finding.consequence_of is None), None)


async def examine(
    url: str, seed: int, *, metrics_urls: Sequence[str] = (), pid: int | None = None
) -> tuple[tuple[Seen, ...], str | None]:
    """The battery against one address, and a drain of the process where it is known.

    The second value says why it ended early, if it did.
    """
    started = time.monotonic()
    seen: list[Seen] = []
    try:
        target = make_target(url, await find_model(url, {}), metrics_urls=metrics_urls)
        storms = [*await _battery(target), *([("drain", DRAIN)] if pid is not None else [])]
        for number, (name, plan) in enumerate(storms):
            plan = await fitted(target, replace(plan, seed=seed * 100 + number))
            result = await run_storm(target, plan, pid=pid if plan.drain else None)
            seconds = time.monotonic() - started
            found = await asyncio.to_thread(find, result)  # other servers are being timed meanwhile
            seen += [Seen(finding, name, seconds) for finding in found]
            if any(one.finding.name in ("wedged", "unreachable") for one in seen):
                break  # nothing more can be learnt from a server that serves nothing
    except TargetError as error:
        return tuple(seen), str(error)
    return tuple(seen), None


async def _battery(target: Target) -> tuple[tuple[str, StormPlan], ...]:
    """Raises TargetError."""
    names: set[str] = set()
    for url in target.metrics:
        try:
            names |= {series.name for series in await scrape(target, url)}
        except ScrapeError as error:
            raise TargetError(f"{url.shown}: {error}") from error
    return next((battery for series, battery in PAIR_BATTERIES.items() if series in names), BATTERY)


async def fitted(target: Target, plan: StormPlan) -> StormPlan:
    """The plan with one prompt of each storm's survivors as long as the server's context allows, where it says how long."""
    if plan.survivors != 1:
        return plan
    context = await find_context(target)
    words = max(1, int((context or 0) * LONG_PROMPT_SHARE) - plan.survivor.max_tokens)
    return replace(plan, survivor=replace(plan.survivor, prompt_words=words))


def schedule(cases: Sequence[Case], runs: int, seed: int) -> list[Turn]:
    """Every case `runs` times with its defect and `runs` times without, in an order drawn from the seed."""
    order = [(case, planted, number) for case in cases for planted in (True, False) for number in range(runs)]
    Random(seed).shuffle(order)
    return [Turn(case, planted, seed + number) for case, planted, number in order]


async def run_selftest(
    turns: Iterable[Turn],
    *,
    jobs: int = 1,
    stop: asyncio.Event | None = None,
    tell: Callable[[Turn, Run], None],
) -> None:
    """All servers, `jobs` at a time, each told when it ends. When `stop` is set, those under way are given up untold."""
    stop = stop or asyncio.Event()
    todo = iter(turns)

    async def worker(folder: Path) -> None:
        for turn in todo:
            if stop.is_set():
                return
            try:
                run = await _one(turn, folder, stop)
            except Stopped:
                return
            tell(turn, run)

    with tempfile.TemporaryDirectory(prefix="windtunnel-selftest-") as scratch:
        async with asyncio.TaskGroup() as group:
            for number in range(jobs):
                folder = Path(scratch) / str(number)
                folder.mkdir()
                group.create_task(worker(folder))


async def _one(turn: Turn, folder: Path, stop: asyncio.Event) -> Run:
    case, planted, seed = turn
    started = time.monotonic()
    arm = case.arm(planted=planted, env=_bytecode(folder.parent))
    try:
        async with running(arm, folder / "server.log", time_scale=1.0, seed=seed, stop=stop) as server:
            metrics = [f"http://127.0.0.1:{port}/metrics" for port in server.more_ports[: case.workers]]
            pid = None if case.workers else server.pid
            seen, unusable = await unless_stopped(examine(server.url, seed, metrics_urls=metrics, pid=pid), stop)
    except Environment as error:
        seen, unusable = (), str(error)
    return Run(case if planted else None, seed, seen, time.monotonic() - started, unusable)


def _bytecode(scratch: Path) -> dict[str, str]:
    """Where Python may write none beside its sources, every start would compile them all: half of a server's CPU time."""
    if not sys.dont_write_bytecode:
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
