"""`windtunnel up PRESET|FILE.toml`: several servers and a router in one command."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from windtunnel.cli.exits import FINDING

if TYPE_CHECKING:
    import asyncio

    from windtunnel.serve.up.plan import RouterKind, UpPlan


def register(app: typer.Typer) -> None:
    app.command("up")(up)


def up(
    what: Annotated[
        str, typer.Argument(help="vllm, sglang, sglang-pd, vllm-pd, vllm-pd-mooncake, or a TOML file with [[server]] tables")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The router's port; 0 picks a free one")] = 0,
    worker_port: Annotated[list[str] | None, typer.Option(help="NAME=PORT of a server; may be repeated")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="How many servers (vllm, sglang)")] = 2,
    prefills: Annotated[int, typer.Option(min=1, max=32, help="How many prefill servers")] = 1,
    decodes: Annotated[int, typer.Option(min=1, max=32, help="How many decode servers")] = 1,
    router: Annotated[
        str | None, typer.Option(help="windtunnel (ours), sglang-router, smg or vllm-router (the packages), or none")
    ] = None,
    args: Annotated[list[str] | None, typer.Option("--args", help="[ROLE, NAME or router:]FLAGS; may be repeated")] = None,
    liveness: Annotated[str, typer.Option(help="How often each /health is asked, as an orchestrator does; 0 is never")] = "10s",
) -> None:
    """Start servers and a router, say where they are, and run until Ctrl-C. Exit codes: 0 stopped, 1 one ended by itself."""
    from windtunnel.cli.glue import fail, run_stoppable

    try:
        plan = _plan(what, port, worker_port or [], args or [], router, liveness, workers, prefills, decodes)
        asked = run_stoppable(lambda stop: _run(plan, stop))
    except (ValueError, OSError) as error:
        fail(str(error))
    if not asked:
        raise typer.Exit(FINDING)


def _plan(
    what: str,
    port: int,
    worker_ports: list[str],
    args: list[str],
    router: str | None,
    liveness: str,
    workers: int,
    prefills: int,
    decodes: int,
) -> "UpPlan":
    from dataclasses import replace

    from windtunnel.core.units import parse_duration_ns
    from windtunnel.serve.up.plan import PRESETS, check_router, preset, read, with_args

    if what in PRESETS:
        plan = preset(what, workers=workers, prefills=prefills, decodes=decodes)
        plan = replace(plan, liveness_s=parse_duration_ns(liveness) / 1e9)
    elif Path(what).is_file():
        plan = read(Path(what))
    else:
        plan = preset(what)
    if router is not None:
        check_router(router, "--router")
        plan = replace(plan, router=cast("RouterKind", router))
    return with_args(_with_ports(replace(plan, router_port=port or plan.router_port), worker_ports), _extra(args))


def _with_ports(plan: "UpPlan", told: list[str]) -> "UpPlan":
    """`NAME=PORT`, or `NAME.bootstrap=PORT`."""
    from dataclasses import replace

    from windtunnel.serve.up.plan import UpError

    servers = {server.name: server for server in plan.servers}
    for item in told:
        name, _, number = item.partition("=")
        name, _, kind = name.partition(".")
        if name not in servers or not number.isdigit() or kind not in ("", "bootstrap"):
            raise UpError(f"--worker-port {item!r}: write NAME=PORT or NAME.bootstrap=PORT; servers are {', '.join(servers)}")
        changes: dict[str, Any] = {"bootstrap_port" if kind else "port": int(number)}
        servers[name] = replace(servers[name], **changes)
    return replace(plan, servers=tuple(servers.values()))


def _extra(args: list[str]) -> dict[str, list[str]]:
    """`--args "--itl 5ms"` for all, `--args "decode:--tp-size 2"` for some."""
    out: dict[str, list[str]] = {}
    for item in args:
        key, colon, words = item.partition(":")
        if item.lstrip().startswith("-") or not colon:
            key, words = "", item
        out.setdefault(key, []).extend(shlex.split(words))
    return out


async def _run(plan: "UpPlan", stop: "asyncio.Event") -> bool:
    import asyncio

    from windtunnel.serve.up.processes import Fleet

    fleet = Fleet(plan)
    starting = asyncio.ensure_future(fleet.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return True
        running = starting.result()
        for name, url in running.servers.items():
            typer.echo(f"{name}: {url}")
        typer.echo(f"ready: {running.url}")
        return await fleet.watch(running, stop, lambda line: typer.echo(line, err=True))
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await fleet.stop()
