"""`windtunnel storm URL`: one storm against anything that speaks OpenAI."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.exits import FINDING, INCONCLUSIVE, OK

if TYPE_CHECKING:
    from windtunnel.lab.plan import StormPlan
    from windtunnel.lab.record import StormResult
    from windtunnel.lab.target import Target
    from windtunnel.lab.trust import Trust

HOW_HELP = "fin, rst, half-close, stop-reading, timeout-retry, abort-id, kill, or a comma list that victims take in turns"
WHEN_HELP = (
    "incomplete, sent, queued, prefill, decode, transfer, between-legs, head, tokens:N, end:N, after:50ms, or a comma list"
)

SET_HELP = "KEY=VALUE of the table `storm` of an experiment file, such as ramp=2s or victim.n=2; may be repeated"


def register(app: typer.Typer) -> None:
    app.command("storm")(storm)


def storm(
    context: typer.Context,
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
    api: Annotated[
        str, typer.Option(help="completions, chat, generate (SGLang's own), messages (Anthropic's) or responses")
    ] = "completions",
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
    ca: Annotated[
        str | None, typer.Option(help="PEM file that vouches for the target, in place of the machine's store")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Verify no certificate")] = False,
    client_cert: Annotated[str | None, typer.Option(help="PEM file of the certificate to come with")] = None,
    client_key: Annotated[str | None, typer.Option(help="PEM file of its key, when that is another one")] = None,
    watch: Annotated[list[str] | None, typer.Option(help="A further gauge, by its full name; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and tags")] = 0,
    max_requests: Annotated[int, typer.Option(help="Limit of requests in all")] = 2_000,
    max_concurrency: Annotated[int, typer.Option(help="Limit of requests at once")] = 256,
    max_duration: Annotated[str, typer.Option(help="Limit of the whole storm")] = "5m",
    clients: Annotated[int, typer.Option(help="So many processes send the requests; one result")] = 1,
    on: Annotated[str, typer.Option(help="Where they run: processes, or ray (an existing Ray cluster)")] = "processes",
    owned: Annotated[bool, typer.Option("--i-own-this-target", help="Allow a target that is not this machine")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; only the result")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json, report.html and junit.xml")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Blow at a server: clients leave, others stay; then say whether anything leaked, hung or was harmed.

    Exit codes: 0 clean, 1 a finding, 2 usage or environment, 3 inconclusive (interrupted, client process lost, no client left).
    Ctrl-C ends the storm and reports what there is; a second one gives up at once, with 2.
    """
    from windtunnel.cli.glue import fail, run_stoppable
    from windtunnel.lab.arms import Stopped
    from windtunnel.lab.dry_run import describe
    from windtunnel.lab.experiment_file import Environment, storm_plan, with_settings
    from windtunnel.lab.target import TargetError, check_hosts

    try:
        plan = storm_plan(with_settings(_values(context.params), setting or []), seed=seed)
        trust = _trust(ca, client_cert, client_key, insecure=insecure)
        target = _target(url, model, header or [], metrics_url or [], watch or [], trust)
        if dry_run:
            typer.echo(describe(target, plan))
            return
        check_hosts(target, owned=owned)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        blow = partial(_run, target, plan, pid=server_pid, find=model is None, quiet=quiet)
        target, result = run_stoppable(blow)
    except Stopped:
        typer.echo("windtunnel: interrupted before the storm began", err=True)
        raise typer.Exit(INCONCLUSIVE) from None
    except (ValueError, OSError, TargetError, Environment) as error:
        fail(str(error))
    _show(target, result, out, as_json=as_json)


_AS_THEY_ARE = (
    "victims rounds survivors hold bystanders later sample_every quiet_deadline request_timeout clients on"
    " max_requests max_concurrency max_duration"
).split()
"""Options that are keys of the table `storm` of an experiment file."""


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The table `storm` of an experiment file that these options mean."""
    first, *others = (part.strip() for part in options["when"].split(","))
    api = {"api": options["api"]}
    victim = {"prompt_words": options["prompt_words"], "max_tokens": options["max_tokens"], "stream": not options["no_stream"]}
    return {
        **{name: options[name] for name in _AS_THEY_ARE},
        "how": [part.strip() for part in options["how"].split(",")],
        "when": first,
        "also": others,
        "victim": {**api, **victim},
        "survivor": {**api, "max_tokens": 64},
        "later_request": api,
    }


def _trust(ca: str | None, client_cert: str | None, client_key: str | None, *, insecure: bool) -> "Trust":
    """Raises ValueError naming the flag."""
    from windtunnel.lab.trust import Trust, check_trust

    try:
        return check_trust(Trust(ca, insecure, client_cert, client_key))
    except ValueError as error:
        name, _, why = str(error).partition(":")
        raise ValueError(f"--{name.replace('_', '-')}:{why}") from None


def _target(url: str, model: str | None, headers: list[str], metrics: list[str], watch: list[str], trust: "Trust") -> "Target":
    """Nothing is sent yet: a model that is not named is `MODEL`."""
    from windtunnel.lab.target import make_target

    pairs = dict(_header(line) for line in headers)
    return make_target(url, model or "MODEL", headers=pairs, metrics_urls=metrics, watch=watch, trust=trust)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip() or "\n" in line or "\r" in line:
        raise ValueError(f"--header {line!r} is not NAME: VALUE")
    return name.strip().lower(), value.strip()


async def _run(
    target: "Target", plan: "StormPlan", stop: Any, *, pid: int | None, find: bool, quiet: bool
) -> tuple["Target", "StormResult"]:
    """The storm; with `find` the model is the first that the target lists. Raises Stopped."""
    from dataclasses import replace

    from windtunnel.lab.arms import unless_stopped
    from windtunnel.lab.progress import storm_watch
    from windtunnel.lab.storm import run_storm
    from windtunnel.lab.target import find_model

    if find:
        target = replace(
            target, model=await unless_stopped(find_model(target.origin.url, target.headers, target.origin.trust), stop)
        )
    with storm_watch(quiet=quiet) as watch:
        return target, await run_storm(target, plan, stop=stop, on_event=watch.event, on_view=watch.view, pid=pid)


def _show(target: "Target", result: "StormResult", out: Path | None, *, as_json: bool) -> None:
    import json
    import shlex
    import sys

    from windtunnel.lab.document import storm_report
    from windtunnel.lab.progress import print_storm
    from windtunnel.lab.report import write_all

    document = storm_report(target, result, reproduce=shlex.join(["windtunnel", *sys.argv[1:]]))
    if out is not None:
        write_all(document, out)
    if as_json:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_storm(document, out)
    raise typer.Exit(FINDING if document["findings"] else INCONCLUSIVE if result.untried else OK)
