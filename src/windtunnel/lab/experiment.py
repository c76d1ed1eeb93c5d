"""Runs an experiment: fresh servers for every trial, arms in an order drawn from the seed, one document at the end.

Trials are paired: each pair runs both arms, in random order, with the same storm seed. Setting `stop` ends the storm in hand,
stops its server, and the document says `inconclusive` with what there is.
"""

import asyncio
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from windtunnel.lab.arms import LOG_LIMIT_NOTE, Running, Stopped, count_patterns, fill, is_cut, ready_url, running
from windtunnel.lab.connection import parse_origin
from windtunnel.lab.document import environment as machine
from windtunnel.lab.document import plan_document, storm_document, versions
from windtunnel.lab.experiment_file import Arm, ArmName, Environment, Experiment, Prediction, at_key
from windtunnel.lab.finding import Severity
from windtunnel.lab.looks import level_at
from windtunnel.lab.plan import StormPlan, check_target_allowed
from windtunnel.lab.redact import redact, redact_file, secrets_of
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import SettingError, TargetError, check_hosts, find_model, make_target
from windtunnel.lab.verdict import decide, effect_document, holds, observed
from windtunnel.lab.view import StormEvent, StormView

FORMAT = 1
RACE_PATTERN = "race_reports"
SERVER_DIED = "server_died"
ARMS: tuple[ArmName, ArmName] = ("control", "treatment")


@dataclass(frozen=True, slots=True)
class Options:
    """How this run differs from the file. None: as the file says."""

    trials: int | None = None
    seed: int | None = None
    time_scale: float = 1.0
    commands: Mapping[str, str] | None = None
    """Arm → command template that replaces the file's."""
    ready_url: str | None = None
    owned: bool = False
    aa: ArmName | None = None
    """Run this arm against itself: what differs then is noise."""
    looks: int = 1
    """Test so often, evenly over the trials, and stop at the first significant effect (`lab.looks`)."""
    out: Path | None = None
    source: str | None = None
    """The name or file that the experiment was loaded by; None: its own name."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a run, for whoever watches: `event` while a storm runs, `trial` when one has ended."""

    arm: ArmName
    trial: int
    done: int
    total: int
    event: StormEvent | None = None
    document: Mapping[str, Any] | None = None
    view: StormView | None = None


Watcher = Callable[[Progress], None]


def with_options(experiment: Experiment, options: Options) -> Experiment:
    """The experiment as it will be run; the effective values end up in the document."""
    arms: dict[str, Arm] = {}
    for name in ARMS:
        arm = experiment.arm(name)
        changes: dict[str, Any] = {}
        command = (options.commands or {}).get(name)
        if command is not None:
            changes |= {"command": command, "url": None}
        if options.ready_url is not None:
            changes["ready_url"] = options.ready_url
        arms[name] = arm.model_copy(update=changes)
    if options.aa is not None:
        arms = dict.fromkeys(ARMS, arms[options.aa])
    changes = {"arms": experiment.arms.model_copy(update=arms)}
    if options.aa is not None:
        changes["predictions"] = _both_arms(experiment, options.aa)
    if options.trials is not None:
        changes["trials"] = options.trials
    if options.seed is not None:
        changes["seed"] = options.seed
    return experiment.model_copy(update=changes)


def _both_arms(experiment: Experiment, name: ArmName) -> tuple[Prediction, ...]:
    """The predictions of one arm, for both."""
    own = [one for one in experiment.predictions if one.arm == name]
    return tuple(one.model_copy(update={"arm": arm, "id": f"{one.id}.{arm}"}) for one in own for arm in ARMS)


def _check_templates(experiment: Experiment, options: Options) -> None:
    """Raises ValueError for a placeholder that does not exist, before anything is started."""
    flags = {(name, "command"): f"--{name}-cmd" for name in options.commands or {}}
    flags |= {(name, "ready_url"): "--ready-url" for name in ARMS if options.ready_url is not None}
    source = options.source or experiment.name
    for name in ARMS:
        arm = experiment.arm(name)
        urls = [(f"metrics_urls.{number}", url) for number, url in enumerate(arm.metrics_urls)]
        for key, template in (("command", arm.command), ("target", arm.target), ("ready_url", arm.ready_url), *urls):
            try:
                fill(template or "", port=0, time_scale=1.0, seed=0)
            except ValueError as error:
                where = flags.get((name, key)) or at_key(source, ["arms", name, *key.split(".")])
                raise ValueError(f"{where}: {error}") from None


def schedule(trials: int, seed: int) -> list[tuple[int, ArmName]]:
    """Pairs of arms, each pair in an order drawn from the seed."""
    random = Random(seed)
    out: list[tuple[int, ArmName]] = []
    for trial in range(trials):
        pair = list(ARMS)
        random.shuffle(pair)
        out += [(trial, name) for name in pair]
    return out


async def run_experiment(
    experiment: Experiment, options: Options, *, stop: asyncio.Event | None = None, watch: Watcher | None = None
) -> dict[str, Any]:
    """The document of a whole run. Raises Environment when the very first trial cannot be run.

    A later one ends the run, and the document says `inconclusive` with the trials there are.
    """
    experiment = with_options(experiment, options)
    stop = stop or asyncio.Event()
    started_at = datetime.now(UTC)
    trials: dict[ArmName, list[dict[str, Any]]] = {name: [] for name in ARMS}
    order = schedule(experiment.trials, experiment.seed)
    environment: str | None = None
    _check_templates(experiment, options)
    with tempfile.TemporaryDirectory(prefix="windtunnel-") as scratch:
        logs = options.out or Path(scratch)
        for done, (trial, name) in enumerate(order):
            if stop.is_set():
                break
            runner = _Trial(experiment, options, name, trial, logs, stop)
            tell = partial(_tell, watch, name, trial, done, len(order))
            document = await runner.run(tell, first=done == 0)
            trials[name].append({**document, "order": done})
            tell(document=document)
            environment = _environment_error(document)
            if environment or _significant_already(experiment, options, trials):
                break
    return make_document(experiment, options, trials, started_at, interrupted=stop.is_set(), environment=environment)


def _environment_error(trial: Mapping[str, Any]) -> str | None:
    """Why the trial could not be run; None also for a server that died in it."""
    died = any(finding["name"] == SERVER_DIED for finding in trial["findings"])
    return None if died or trial["error"] is None else f"{trial['arm']}, trial {trial['trial']}: {trial['error']}"


def _significant_already(experiment: Experiment, options: Options, trials: Mapping[ArmName, list[dict[str, Any]]]) -> bool:
    """Whether a look is due after this trial, and sees the effect at its level."""
    if len(trials["control"]) != len(trials["treatment"]):
        return False
    level = _level(experiment, options, trials, experiment.effect.alpha)
    if level is None:
        return False
    effect = effect_document(experiment.effect, valid(trials["control"]), valid(trials["treatment"]))
    return effect["p_value"] is not None and effect["p_value"] < level


def _level(experiment: Experiment, options: Options, trials: Mapping[ArmName, Sequence[Any]], alpha: float) -> float | None:
    """Of the look that is due after these trials; an equivalence is not looked at before the end."""
    looks = 1 if experiment.effect.margin is not None else options.looks
    return level_at(len(trials["control"]), experiment.trials, looks, alpha)


def _tell(
    watch: Watcher | None,
    name: ArmName,
    trial: int,
    done: int,
    total: int,
    event: StormEvent | None = None,
    document: Mapping[str, Any] | None = None,
    view: StormView | None = None,
) -> None:
    if watch is not None:
        watch(Progress(name, trial, done, total, event, document, view))


@dataclass(frozen=True, slots=True)
class _Trial:
    """One arm once: server up, storm, server down, log read."""

    experiment: Experiment
    options: Options
    name: ArmName
    trial: int
    logs: Path
    stop: asyncio.Event

    async def run(self, tell: Callable[..., None], *, first: bool) -> dict[str, Any]:
        arm = self.experiment.arm(self.name)
        log = self.logs / f"{self.name}-{self.trial + 1}.log"
        seed = self.experiment.seed + self.trial
        plan = self.experiment.plan(self.name, seed=seed, time_scale=self.options.time_scale)
        head = {"trial": self.trial + 1, "arm": self.name, "seed": seed, "time_scale": self.options.time_scale}
        try:
            document = await self._storm(log, plan, tell)
        except Stopped:
            document = {**_empty_trial(), "interrupted": "stopped"}
        except (TargetError, Environment, ValueError) as failure:
            message = redact(self._told(failure), _secrets(self.experiment))
            if first:
                raise Environment(f"{self.name}, trial {self.trial + 1}: {message}") from failure
            document = {**_empty_trial(), "error": message}
        if is_cut(log):
            document = {**document, "notes": [*document["notes"], LOG_LIMIT_NOTE]}
        matches = count_patterns(log, arm.log_patterns)
        races = matches.get(RACE_PATTERN, 0)
        redact_file(log, _secrets(self.experiment))
        return {**head, "error": None, **document, "race_reports": races, "log_matches": matches}

    def _told(self, failure: Exception) -> str:
        """A setting by its key and line in the file."""
        if not isinstance(failure, SettingError):
            return str(failure)
        return f"{at_key(self.options.source or self.experiment.name, ['arms', self.name, failure.key])}: {failure.told}"

    async def _storm(self, log: Path, plan: StormPlan, tell: Callable[..., None]) -> dict[str, Any]:
        arm = self.experiment.arm(self.name)
        if arm.url is not None:
            for url in (arm.url, ready_url(arm)):
                check_target_allowed(parse_origin(url).host, owned=self.options.owned)
        async with running(arm, log, time_scale=self.options.time_scale, seed=plan.seed, stop=self.stop) as server:
            watch = _DeathWatch(server, tell)
            try:
                document = await self._blow(arm, server, plan, watch)
            except TargetError:
                status = await watch.exit_status()
                if status is None:
                    raise
                return _died(_empty_trial(), status)
            status = await watch.exit_status()
            return document if status is None else _died(document, status)

    async def _blow(self, arm: Arm, server: Running, plan: StormPlan, watch: "_DeathWatch") -> dict[str, Any]:
        check_target_allowed(parse_origin(server.url).host, owned=self.options.owned)
        model = arm.model or await find_model(server.url, arm.headers, arm.tls.trust)
        filled = partial(fill, port=server.port, more_ports=server.more_ports, time_scale=1.0, seed=0)
        sources = [filled(one) for one in arm.metrics_urls]
        target = make_target(server.url, model, headers=arm.headers, metrics_urls=sources, watch=arm.watch, trust=arm.tls.trust)
        check_hosts(target, owned=self.options.owned)
        result = await run_storm(target, plan, stop=self.stop, on_event=watch.on_event, on_view=watch.on_view, pid=server.pid)
        lost = f"client processes were lost: {result.untried}" if result.lost_clients and not result.interrupted else None
        return {**storm_document(result), "error": lost}


class _DeathWatch:
    """Tells a server that ended by itself from one that the drain has ended."""

    def __init__(self, server: Running, tell: Callable[..., None]) -> None:
        self._server = server
        self._tell = tell
        self._drained = False
        self._before_drain: int | None = None

    def on_event(self, event: StormEvent) -> None:
        if event.phase == "drain" and self._server.process is not None:
            self._drained, self._before_drain = True, self._server.process.returncode
        self._tell(event)

    def on_view(self, view: StormView) -> None:
        self._tell(view=view)

    async def exit_status(self) -> int | None:
        return self._before_drain if self._drained else await self._server.exit_status()


def _died(document: Mapping[str, Any], status: int) -> dict[str, Any]:
    """The trial of a server that ended by itself: all else that was seen may be a consequence, so nothing of it is judged."""
    error = f"the server ended by itself with exit status {status}"
    finding = {
        "name": SERVER_DIED,
        "severity": Severity.HIGH.value,
        "usual_cause": "the server crashed, was killed from outside, or shut itself down: see the end of its log",
        "count": 1,
        "evidence": [error],
    }
    leaked = dict.fromkeys(document["leaked"], None)
    return {**document, "leaked": leaked, "findings": [finding], "error": error}


def _empty_trial() -> dict[str, Any]:
    """A trial that could not be run: everything is there, and nothing was seen."""
    none = {"sent": 0, "complete": 0, "lost": 0, "by_end": {}, "text_faults": {}}
    return {
        "engine_kind": None,
        "server": {},
        "oracle": False,
        "victims": {"sent": 0, "left": 0, "left_in": {}, "by_end": {}},
        "bystanders": {"sent": 0, "non_200": 0, "harmed": 0, "by_status": {}},
        "survivors": none,
        "calm": none,
        "retries": none,
        "process": {},
        "direct": None,
        "drain": None,
        "later_streams": none,
        "leaked": {"running": None, "waiting": None, "kv_usage": None},
        "quiet_s": None,
        "freed_after_s": None,
        "zombie_tokens": 0,
        "baseline": {"gauges": {}},
        "series": [],
        "queues": {},
        "counters": {},
        "clients": {"processes": 1, "on": "processes", "lost": []},
        "phases": [],
        "events": [],
        "findings": [],
        "interrupted": None,
        "untried": "no result",
        "notes": [],
    }


def valid(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trial for trial in trials if trial["error"] is None and trial["interrupted"] is None]


def make_document(
    experiment: Experiment,
    options: Options,
    trials: Mapping[ArmName, list[dict[str, Any]]],
    started_at: datetime,
    *,
    interrupted: bool,
    environment: str | None = None,
) -> dict[str, Any]:
    """Predictions, effect, verdict and findings over the trials there are."""
    good = {name: valid(trials[name]) for name in ARMS}
    predictions = [
        {**one.model_dump(), "holds": holds(one, good[one.arm]), "observed": observed(one, good[one.arm])}
        for one in experiment.predictions
    ]
    confidence = 1 - (_level(experiment, options, trials, 0.05) or 0.05)
    effect = effect_document(experiment.effect, good["control"], good["treatment"], confidence)
    level = _level(experiment, options, trials, experiment.effect.alpha)
    effect |= {"aa": options.aa is not None, "looks": options.looks, "level": level or experiment.effect.alpha}
    complete = not interrupted and environment is None and all(good.values())
    errors = [trial["error"] for name in ARMS for trial in trials[name] if trial["error"] is not None]
    verdict, why = decide([one["holds"] for one in predictions], effect, complete=complete, errors=errors)
    findings = _findings(trials)
    why += _unpredicted(findings)
    document = {
        "format": FORMAT,
        "experiment": experiment.name,
        "title": experiment.title,
        "description": experiment.description.strip(),
        "verdict": verdict,
        "why": why,
        "interrupted": interrupted,
        "environment_error": environment,
        "predictions": predictions,
        "effect": effect,
        "arms": {name: _arm_document(experiment, name, trials[name]) for name in ARMS},
        "findings": findings,
        "storm": plan_document(experiment.storm.plan(seed=experiment.seed, time_scale=options.time_scale)),
        "seed": experiment.seed,
        "trials": experiment.trials,
        "time_scale": options.time_scale,
        "started_at": started_at.isoformat(timespec="seconds"),
        "duration_s": round((datetime.now(UTC) - started_at).total_seconds(), 3),
        "versions": versions(),
        "environment": machine(),
        "reproduce": reproduce(experiment, options),
    }
    cleaned: dict[str, Any] = redact(document, _secrets(experiment))
    return cleaned


def _secrets(experiment: Experiment) -> set[str]:
    arms = [experiment.arm(name) for name in ARMS]
    return {one for arm in arms for one in secrets_of(arm.headers) | secrets_of(arm.env)}


def _unpredicted(findings: Sequence[Mapping[str, Any]]) -> str:
    """A hidden clean-up explains a refuted "never": the verdict names it."""
    found = next((one for one in findings if one["name"] == "hidden_cleanup"), None)
    return f"; a clean-up that nobody predicted: in the {found['arm']} arm {found['evidence'][0]}" if found else ""


def _arm_document(experiment: Experiment, name: ArmName, trials: list[dict[str, Any]]) -> dict[str, Any]:
    arm = experiment.arm(name)
    return {"text": arm.text, "command": arm.command, "url": arm.url, "target": arm.target, "trials": trials}


def _findings(trials: Mapping[ArmName, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every finding of every trial, with where it was made."""
    return [
        {**finding, "arm": name, "trial": trial["trial"]}
        for name in ARMS
        for trial in trials[name]
        for finding in trial["findings"]
    ]


def reproduce(experiment: Experiment, options: Options) -> str:
    """The command that runs this again, as a person would type it."""
    words = ["windtunnel", "experiment", "run", options.source or experiment.name]
    words += ["--trials", str(experiment.trials), "--seed", str(experiment.seed)]
    if options.time_scale != 1.0:
        words += ["--time-scale", f"{options.time_scale:g}"]
    for name, command in (options.commands or {}).items():
        words += [f"--{name}-cmd", command]
    if options.aa is not None:
        words += ["--aa", options.aa]
    if options.looks > 1:
        words += ["--looks", str(options.looks)]
    if options.owned:
        words.append("--i-own-this-target")
    if options.ready_url:
        words += ["--ready-url", options.ready_url]
    return shlex.join(words)
