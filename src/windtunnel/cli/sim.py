"""`windtunnel sim`: a cluster in virtual time."""

from pathlib import Path
from typing import Any

import typer

from windtunnel.cli.exits import USAGE


def register(app: typer.Typer) -> None:
    app.command("sim")(sim)


def sim(
    scenario: Path | None = typer.Argument(None, help="A scenario file (TOML). Flags change its values."),
    engines: int | None = typer.Option(None, help="Engines in the cluster."),
    rate: float | None = typer.Option(None, help="Requests per second."),
    duration: str | None = typer.Option(None, help="How long arrivals come, such as 10m."),
    policy: str | None = typer.Option(
        None, help="round-robin, random, least-load, power-of-two, prefix-aware, session-affinity."
    ),
    policy_file: Path | None = typer.Option(None, help="A Python file with make_policy(context)."),
    workload: str | None = typer.Option(None, help="poisson, constant, gamma, onoff, closed or multiturn."),
    trace: Path | None = typer.Option(None, help="A trace file; its format is told from its first line."),
    prompt_tokens: str | None = typer.Option(None, help="A number or a distribution, such as lognormal:512:256."),
    output_tokens: str | None = typer.Option(None, help="As --prompt-tokens."),
    users: int | None = typer.Option(None, help="Users of a closed loop."),
    requests: int | None = typer.Option(None, help="Stop after so many arrivals."),
    timeout: str | None = typer.Option(None, help="Of one attempt, such as 30s."),
    retries: int | None = typer.Option(None, help="Retries of one call."),
    abort_share: float | None = typer.Option(None, help="Share of the calls that their clients close early, 0 to 1."),
    seed: int | None = typer.Option(None, help="Same seed, same run."),
    set_: list[str] = typer.Option(
        [], "--set", help="KEY=VALUE for any key of a scenario, such as engines.0.config.max_num_seqs=64."
    ),
    sweep: list[str] = typer.Option(
        [], "--sweep", help="KEY=A,B,C: a run for each value (a ; between values that contain commas)."
    ),
    on: str = typer.Option("processes", help="Where a sweep runs: processes or ray."),
    jobs: int | None = typer.Option(None, help="Processes of a sweep; the number of cores without it."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    out: Path | None = typer.Option(None, help="Folder for summary, request log, metrics, time line and report."),
) -> None:
    """Run a cluster of simulated engines in virtual time."""
    flags = {
        "engines.0.count": engines, "workload.rate": rate, "duration": duration, "policy": policy,
        "policy_file": str(policy_file) if policy_file else None, "workload.kind": "trace" if trace else workload,
        "workload.trace": str(trace) if trace else None, "workload.prompt_tokens": prompt_tokens,
        "workload.output_tokens": output_tokens, "workload.users": users, "workload.requests": requests,
        "clients.timeout": timeout, "clients.retries": retries, "clients.abort.share": abort_share, "seed": seed,
    }  # fmt: skip
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    from windtunnel.sim.command import Command, run_command
    from windtunnel.sim.scenario import ScenarioError

    try:
        text = run_command(Command(scenario, given, tuple(set_), tuple(sweep), on, jobs, as_json, out))
    except ScenarioError as error:
        typer.echo(f"windtunnel sim: {error}", err=True)
        raise typer.Exit(USAGE) from None
    typer.echo(text)
