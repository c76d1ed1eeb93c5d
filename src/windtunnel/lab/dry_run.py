"""What a plan will send, without sending it."""

from collections.abc import Iterator

from windtunnel.lab.asks import AskMaker
from windtunnel.lab.baseline import probe_shape
from windtunnel.lab.links import described
from windtunnel.lab.plan import Role, StormPlan
from windtunnel.lab.record import Ask
from windtunnel.lab.target import Target


def planned_asks(plan: StormPlan) -> Iterator[Ask]:
    """All generation requests of a plan, in the order in which they are made; the same seed makes the same ones."""
    maker = AskMaker(plan.seed)
    yield maker.ask(Role.PROBE, 0, probe_shape(plan))
    for round_ in range(plan.rounds):
        for _ in range(plan.calm):
            yield maker.ask(Role.CALM, round_, plan.survivor)
        for _ in range(plan.victims):
            yield maker.ask(Role.VICTIM, round_, plan.victim)
        for _ in range(plan.survivors):
            yield maker.ask(Role.SURVIVOR, round_, plan.survivor)
    for _ in range(plan.later):
        yield maker.ask(Role.LATER, 0, plan.later_shape)


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
