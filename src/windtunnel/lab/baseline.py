"""Before a storm: how the target answers a plain request, and what its gauges are."""

import asyncio
from dataclasses import dataclass

from windtunnel.lab.asks import AskMaker
from windtunnel.lab.client import run_request
from windtunnel.lab.oracle_check import Known, check_text
from windtunnel.lab.plan import Role, Shape, StormPlan
from windtunnel.lab.record import End, Sample, StreamRecord
from windtunnel.lab.sampler import Sampler
from windtunnel.lab.session import Session
from windtunnel.lab.target import SettingError, Target, TargetError

BASELINE_SAMPLES = 3
PROBE_TOKENS = 12
PROBE_ATTEMPTS = 3
NO_SUCH_API = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class Calibration:
    """`oracle`: answers are in its words. `exact`: they are as long as was asked."""

    probes: tuple[StreamRecord, ...]
    oracle: bool
    exact: bool


def probe_shape(plan: StormPlan) -> Shape:
    return Shape(plan.api, max_tokens=PROBE_TOKENS)


async def calibrate(session: Session, plan: StormPlan, maker: AskMaker) -> Calibration:
    """Ask plainly, again when the answer is not the oracle's: a target may answer every second request wrongly.

    Raises TargetError when nothing is answered.
    """
    probes: list[StreamRecord] = []
    while len(probes) < PROBE_ATTEMPTS and not (probes and _speaks_oracle(probes[-1])):
        probes.append(await run_request(session, maker.ask(Role.PROBE, 0, probe_shape(plan))))
    last = probes[-1]
    if not any(probe.end is End.FINISHED for probe in probes):
        other = "; another API is named with --api, in an experiment file with api = in each request"
        raise TargetError(
            f"{session.target.origin.url} does not answer a plain stream by {plan.api.value}:"
            f" {last.end.value}, {last.error}{other if last.status in NO_SUCH_API else ''}"
        )
    oracle = plan.oracle == "on" or (plan.oracle == "auto" and _speaks_oracle(last))
    return Calibration(tuple(probes), oracle, exact=len(last.words) == last.ask.max_tokens)


def _speaks_oracle(probe: StreamRecord) -> bool:
    fault = check_text(probe.ask.tag, probe.words, Known([probe.ask]), whole=None)
    return probe.end is End.FINISHED and fault is None and bool(probe.words)


async def read_baseline(session: Session, sampler: Sampler, every_ns: int) -> Sample:
    """The last usable one of a few samples; an empty one when there are no metrics. Raises TargetError."""
    if sampler.blind:
        return Sample(session.now_ns(), "baseline", 0, session.opened, {}, {}, None, "no metrics")
    for _ in range(BASELINE_SAMPLES):
        await asyncio.sleep(every_ns / 1e9)
        await sampler.sample()
    last = sampler.last_usable()
    if last is None:
        raise TargetError(f"no metrics could be read before the storm: {sampler.samples[-1].error}")
    return last


def check_watched(target: Target, sampler: Sampler, baseline: Sample) -> None:
    """Raises SettingError for a gauge that was asked for and that no page shows, not even as NaN."""
    seen = baseline.gauges.keys() | sampler.not_numbers
    absent = [name for name in target.watch if name not in seen]
    if absent:
        pages = ", ".join(url.shown for url in target.metrics)
        told = f"{', '.join(absent)}: not on {pages}; write the gauge's full name as it stands there"
        raise SettingError("--watch", "watch", told)
