"""`windtunnel sim`: a cluster in virtual time."""

from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.cli.exits import USAGE


def register(app: typer.Typer) -> None:
    app.command("sim")(sim)


def sim(
    scenario: Annotated[Path | None, typer.Argument(help="A scenario file (TOML). Flags change its values.")] = None,
    engines: Annotated[int | None, typer.Option(help="Engines in the cluster.")] = None,
    engine: Annotated[str | None, typer.Option(help="The kind of engine: vllm or sglang.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    duration: Annotated[str | None, typer.Option(help="How long arrivals come, such as 10m.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="round-robin, random, least-load, power-of-two, prefix-aware, session-affinity or pd-pairs."),
    ] = None,
    policy_file: Annotated[Path | None, typer.Option(help="A Python file with make_policy(context).")] = None,
    workload: Annotated[str | None, typer.Option(help="poisson, constant, gamma, onoff, closed or multiturn.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace file; its format is told from its first line.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="A number or a distribution, such as lognormal:512:256.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="As --prompt-tokens.")] = None,
    users: Annotated[int | None, typer.Option(help="Users of a closed loop.")] = None,
    requests: Annotated[int | None, typer.Option(help="Stop after so many arrivals.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Of one attempt, such as 30s.")] = None,
    retries: Annotated[int | None, typer.Option(help="Retries of one call.")] = None,
    abort_share: Annotated[
        float | None, typer.Option(help="Share of the calls that their clients close early, 0 to 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE for any key, such as engines.0.config.max_num_seqs=64.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", help="KEY=A,B,C: a run for each (; between values with commas).")
    ] = None,
    on: Annotated[str, typer.Option(help="Where a sweep runs: processes or ray.")] = "processes",
    jobs: Annotated[int | None, typer.Option(help="Processes of a sweep; the number of cores without it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for summary, request log, metrics, time line and report.")] = None,
) -> None:
    """Run a cluster of simulated engines in virtual time."""
    flags = {
        "engines.0.count": engines, "engines.0.kind": engine, "workload.rate": rate, "duration": duration, "policy": policy,
        "policy_file": str(policy_file) if policy_file else None, "workload.kind": "trace" if trace else workload,
        "workload.trace": str(trace) if trace else None, "workload.prompt_tokens": prompt_tokens,
        "workload.output_tokens": output_tokens, "workload.users": users, "workload.requests": requests,
        "clients.timeout": timeout, "clients.retries": retries, "clients.abort.share": abort_share, "seed": seed,
    }  # fmt: skip
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    from windtunnel.sim.command import Command, run_command
    from windtunnel.sim.scenario import ScenarioError

    try:
        text = run_command(Command(scenario, given, tuple(set_ or ()), tuple(sweep or ()), on, jobs, as_json, out))
    except ScenarioError as error:
        typer.echo(f"windtunnel sim: {error}", err=True)
        raise typer.Exit(USAGE) from None
    typer.echo(text)
