"""`windtunnel storm URL`: one storm against anything that speaks OpenAI."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.exits import FINDING, INCONCLUSIVE, OK

if TYPE_CHECKING:
    from windtunnel.lab.plan import StormPlan
    from windtunnel.lab.record import StormResult
    from windtunnel.lab.target import Target

HOW_HELP = "fin, rst, half-close, stop-reading, timeout-retry, abort-id, kill, or a comma list that victims take in turns"
WHEN_HELP = "incomplete, sent, queued, prefill, transfer, between-legs, head, tokens:N, end:N, after:50ms, or a comma list"

SET_HELP = "KEY=VALUE of the table `storm` of an experiment file, such as ramp=2s or victim.n=2; may be repeated"


def register(app: typer.Typer) -> None:
    app.command("storm")(storm)


def storm(
    url: Annotated[str, typer.Argument(help="Base URL, such as http://127.0.0.1:8000")],
    model: Annotated[str | None, typer.Option(help="Model name; default: the first of /v1/models")] = None,
    victims: Annotated[int, typer.Option(help="Requests per round whose client leaves")] = 20,
    rounds: Annotated[int, typer.Option(help="How often the victims come")] = 1,
    survivors: Annotated[int, typer.Option(help="Streams beside the victims, per round, that stay to the end")] = 4,
    how: Annotated[str, typer.Option(help=HOW_HELP)] = "fin",
    when: Annotated[str, typer.Option(help=WHEN_HELP)] = "tokens:3",
    hold: Annotated[bool, typer.Option(help="Bring all victims into the state before any leaves")] = False,
    setting: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    server_pid: Annotated[
        int | None, typer.Option(help="The server's process: its memory, threads, sockets are watched")
    ] = None,
    api: Annotated[str, typer.Option(help="completions or chat")] = "completions",
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Victims do not stream; use --when after:… or sent")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens that each victim asks for")] = 256,
    prompt_words: Annotated[int, typer.Option(help="Length of each victim's prompt")] = 16,
    bystanders: Annotated[int, typer.Option(help="Requests of others after each departure: /metrics and completions")] = 40,
    later: Annotated[int, typer.Option(help="Normal streams afterwards")] = 20,
    sample_every: Annotated[str, typer.Option(help="Cadence of the metrics samples")] = "50ms",
    quiet_deadline: Annotated[str, typer.Option(help="How long to wait for quiet metrics")] = "10s",
    request_timeout: Annotated[str, typer.Option(help="How long one request may take")] = "30s",
    header: Annotated[list[str] | None, typer.Option(help="NAME: VALUE, sent with every request; may be repeated")] = None,
    metrics_url: Annotated[list[str] | None, typer.Option(help="Where metrics are read; may be repeated")] = None,
    watch: Annotated[list[str] | None, typer.Option(help="A further gauge, by its full name; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and tags")] = 0,
    max_requests: Annotated[int, typer.Option(help="Limit of requests in all")] = 2_000,
    max_concurrency: Annotated[int, typer.Option(help="Limit of requests at once")] = 256,
    max_duration: Annotated[str, typer.Option(help="Limit of the whole storm")] = "5m",
    owned: Annotated[bool, typer.Option("--i-own-this-target", help="Allow a target that is not this machine")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Blow at a server: clients leave, others stay; then say whether anything leaked, hung or was harmed.

    Exit codes: 0 clean, 1 a finding, 2 usage or environment, 3 inconclusive (interrupted, or no client left, so nothing was
    tried).
    """
    from windtunnel.cli.glue import fail, run_stoppable
    from windtunnel.lab.experiment_file import Environment, storm_plan, with_settings
    from windtunnel.lab.storm import describe
    from windtunnel.lab.target import TargetError, check_hosts

    try:
        values = {
            "victims": victims,
            "rounds": rounds,
            "survivors": survivors,
            "how": [part.strip() for part in how.split(",")],
            **_moments(when),
            "hold": hold,
            "victim": {"api": api, "prompt_words": prompt_words, "max_tokens": max_tokens, "stream": not no_stream},
            "survivor": {"api": api, "max_tokens": 64},
            "bystanders": bystanders,
            "later": later,
            "later_request": {"api": api},
            "sample_every": sample_every,
            "quiet_deadline": quiet_deadline,
            "request_timeout": request_timeout,
            "max_requests": max_requests,
            "max_concurrency": max_concurrency,
            "max_duration": max_duration,
        }
        plan = storm_plan(with_settings(values, setting or []), seed=seed)
        target = _target(url, model, header or [], metrics_url or [], watch or [])
        if dry_run:
            typer.echo(describe(target, plan))
            return
        check_hosts(target, owned=owned)
        target = _with_model(target, url) if model is None else target
        result = run_stoppable(lambda stop: _run(target, plan, stop, server_pid))
    except (ValueError, TargetError, Environment) as error:
        fail(str(error))
    _show(target, result, as_json=as_json)


def _moments(text: str) -> dict[str, Any]:
    first, *others = (part.strip() for part in text.split(","))
    return {"when": first, "also": others}


def _target(url: str, model: str | None, headers: list[str], metrics: list[str], watch: list[str]) -> "Target":
    """Nothing is sent yet: a model that is not named is `MODEL`."""
    from windtunnel.lab.target import make_target

    pairs = dict(_header(line) for line in headers)
    return make_target(url, model or "MODEL", headers=pairs, metrics_urls=metrics, watch=watch)


def _with_model(target: "Target", url: str) -> "Target":
    """The target with the first model that it lists."""
    import asyncio
    from dataclasses import replace

    from windtunnel.lab.target import find_model

    return replace(target, model=asyncio.run(find_model(url, target.headers)))


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip() or "\n" in line or "\r" in line:
        raise ValueError(f"--header {line!r} is not NAME: VALUE")
    return name.strip().lower(), value.strip()


async def _run(target: "Target", plan: "StormPlan", stop: Any, pid: int | None) -> "StormResult":
    from windtunnel.lab.progress import storm_watch
    from windtunnel.lab.storm import run_storm

    with storm_watch() as tell:
        return await run_storm(target, plan, stop=stop, on_event=tell, pid=pid)


def _show(target: "Target", result: "StormResult", *, as_json: bool) -> None:
    import json
    import shlex
    import sys

    from windtunnel.lab.document import storm_report
    from windtunnel.lab.progress import print_storm

    document = storm_report(target, result, reproduce=shlex.join(["windtunnel", *sys.argv[1:]]))
    if as_json:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_storm(document)
    victims = document["victims"]
    untried = result.interrupted or not victims["left"]
    raise typer.Exit(FINDING if document["findings"] else INCONCLUSIVE if untried else OK)
