"""`windtunnel router`: a minimal balancer, plain or for prefill/decode pairs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from windtunnel.cli.exits import USAGE

if TYPE_CHECKING:
    from windtunnel.serve.router.config import RouterConfig

HELP = """usage: windtunnel router --worker-urls URL [URL…]
       windtunnel router --pd-disaggregation --prefill URL [BOOTSTRAP_PORT] --decode URL

  --host, --port        where to listen (127.0.0.1, 30000)
  --worker-urls         plain workers, in turns
  --pd-disaggregation   pairs: the same body to one prefill and one decode, as SGLang's mini_lb
  --prefill             a prefill worker and its bootstrap port (or none); may be repeated
  --decode              a decode worker; may be repeated"""

_ANY_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    app.command("router", context_settings=_ANY_FLAGS, help="Route to simulated or real workers (SGLang's mini_lb).")(router)


def router(context: typer.Context) -> None:
    if {"--help", "-h"} & set(context.args):
        typer.echo(HELP)
        return
    try:
        config = parse(context.args)
    except ValueError as error:
        typer.echo(f"windtunnel router: {error}", err=True)
        raise typer.Exit(USAGE) from None
    from windtunnel.serve.router.server import run

    run(config)


def parse(args: Sequence[str]) -> "RouterConfig":
    """Raises ValueError that names the flag."""
    from windtunnel.serve.router.config import RouterConfig, prefill_address, worker_url

    readers: dict[str, Callable[[list[str]], Any]] = {
        "host": lambda values: _one("host", values),
        "port": lambda values: _port(_one("port", values)),
        "worker-urls": lambda values: tuple(worker_url(value) for value in values),
        "pd-disaggregation": lambda values: True,
        "prefill": lambda values: (prefill_address(values[0], values[1] if len(values) > 1 else None),),
        "decode": lambda values: tuple(worker_url(value) for value in values),
    }
    fields = {"worker-urls": "workers", "pd-disaggregation": "pd", "prefill": "prefills", "decode": "decodes"}
    told: dict[str, Any] = {}
    for name, values in _split(args):
        if name not in readers:
            raise ValueError(f"--{name} is not a flag; those are {', '.join('--' + one for one in readers)}")
        if not values and name != "pd-disaggregation":
            raise ValueError(f"--{name} needs a value")
        value, field = readers[name](values), fields.get(name, name)
        told[field] = told[field] + value if isinstance(value, tuple) and field in told else value
    return RouterConfig(**told)


def _split(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    out: list[tuple[str, list[str]]] = []
    for word in args:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            out.append((name, [value] if has_value else []))
        elif out:
            out[-1][1].append(word)
        else:
            raise ValueError(f"{word!r} stands alone: a value must follow a flag")
    return out


def _one(name: str, values: list[str]) -> str:
    if len(values) != 1:
        raise ValueError(f"--{name} takes one value, not {len(values)}")
    return values[0]


def _port(value: str) -> int:
    if not value.isdigit() or int(value) > 65535:
        raise ValueError(f"--port is {value!r}: write a number from 0 to 65535")
    return int(value)
