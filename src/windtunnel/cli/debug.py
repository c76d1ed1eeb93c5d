"""`windtunnel debug URL`: for every live request which queue, room, status, slots and pages it holds, and since when."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from windtunnel.cli.exits import FINDING

_COLUMNS = ("request", "queue", "for", "room", "status", "slot", "row", "pages", "tokens")


def register(app: typer.Typer) -> None:
    app.command("debug")(debug)


def debug(
    url: Annotated[str, typer.Argument(help="Base URL of a simulated server, such as http://127.0.0.1:30000")],
    stuck: Annotated[str | None, typer.Option(help="Only requests that have been where they are for so long (10s)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout")] = False,
) -> None:
    """Say where requests are and what they hold. Exit codes: 0; 1 when --stuck is given and finds one; 2 no answer."""
    import asyncio
    import json

    from windtunnel.cli.glue import fail
    from windtunnel.core.units import parse_duration_ns

    try:
        least_ms = 0.0 if stuck is None else parse_duration_ns(stuck) / 1e6
        seen = asyncio.run(_ask(url))
    except (ValueError, OSError) as error:
        fail(str(error))
    live = [one for one in seen["live"] if one["in_state_ms"] >= least_ms]
    if as_json:
        typer.echo(json.dumps({**seen, "live": live}, indent=2))
    else:
        for line in table(live):
            typer.echo(line)
        for part in seen["disaggregation"]:
            typer.echo(_workers(part))
    raise typer.Exit(FINDING if stuck is not None and live else 0)


async def _ask(url: str) -> dict[str, Any]:
    """`/debug/requests` and, where there is one, `/debug/disaggregation`. Raises OSError, ValueError."""
    import json

    from windtunnel.lab.connection import ConnectionCut, MalformedResponse, fetch, parse_origin

    origin = parse_origin(url)
    try:
        requests = await fetch(origin, "GET", "/debug/requests", {})
        disaggregation = await fetch(origin, "GET", "/debug/disaggregation", {})
    except (ConnectionCut, MalformedResponse) as error:
        raise OSError(f"{url}: {error}") from error
    if requests.status != 200:
        raise ValueError(f"{url}/debug/requests answers {requests.status}: only simulated servers have it")
    parts = json.loads(disaggregation.body) if disaggregation.status == 200 else []
    return {"live": json.loads(requests.body)["live"], "disaggregation": parts}


def table(live: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each request, oldest in its state first, under a line of headings."""
    rows = [_row(one) for one in sorted(live, key=lambda one: -one["in_state_ms"])]
    if not rows:
        return ["no such request"]
    widths = [max(len(name), *(len(row[at]) for row in rows)) for at, name in enumerate(_COLUMNS)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (_COLUMNS, *rows)]


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    held = one["resources"]
    status = held.get("status")
    return (
        one["request_id"],
        held.get("queue", one["state"]),
        f"{one['in_state_ms'] / 1000:.1f}s",
        _text(held.get("room")),
        "-" if status is None else ",".join(_text(rank) for rank in status),
        _text(held.get("metadata_slot")),
        _text(held.get("row")),
        str(len(held.get("pages", held.get("block_ids", ())))),
        f"{one['computed_tokens']}/{one['prompt_tokens']}+{one['output_tokens']}",
    )


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _workers(part: Mapping[str, Any]) -> str:
    """Held in all, and what waits: transfer workers (SGLang), blocks that are kept for a reader (vLLM)."""
    held = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in part["outstanding"].items())
    busy = [
        f"rank {rank} queue {number}: room {one['room']} at {one['action']}, {one['queued']} behind it"
        for rank, workers in enumerate(part.get("transfer_workers", ()))
        for number, one in enumerate(workers)
        if one["room"] is not None
    ]
    busy += [
        f"{one['request_id']}: {len(one['blocks'])} blocks for another {one['lease_ms'] / 1000:.1f}s"
        for one in part.get("holds", ())
    ]
    kind = part["connector"] if "connector" in part else f"release {part['profile']}, rule {part['status_rule']}"
    return "\n".join([f"{part['mode']} ({kind}) holds {held}", *(f"  {line}" for line in busy)])
