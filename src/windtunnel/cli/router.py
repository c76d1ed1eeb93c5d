"""`windtunnel router`: a minimal balancer, plain or for prefill/decode pairs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from windtunnel.cli.exits import USAGE
from windtunnel.cli.glue import ANY_FLAGS

if TYPE_CHECKING:
    from windtunnel.serve.router.config import RouterConfig

HELP = """usage: windtunnel router --worker-urls URL [URL…]
       windtunnel router --pd-disaggregation --prefill URL [BOOTSTRAP_PORT] --decode URL
       windtunnel router --vllm-pd-disaggregation --prefill URL --decode URL
       windtunnel router --vllm-pd-disaggregation --kv-connector mooncake --prefill URL [BOOTSTRAP_PORT] --decode URL

  --host, --port        where to listen (127.0.0.1, 30000)
  --worker-urls         plain workers, in turns
  --pd-disaggregation   pairs: the same body to one prefill and one decode, as SGLang's mini_lb
  --prefill             a prefill worker and its bootstrap port (or none); may be repeated
  --decode              a decode worker; may be repeated

  --vllm-pd-disaggregation  first one prefill, then one decode with what it answered, as the llm-d sidecar. The header
                        x-prefiller-host-port names the prefill (one of --prefill, else 403); without it they take turns
  --kv-connector        nixl (as above) or mooncake: both at once, as vLLM's example proxy; without the flags that follow
  --header-only         no header, no prefill, as the real sidecar
  --prefill-sampling    of several endpoints in the header a random one, not the first
  --prefill-retries     after a prefill's 502, 503 or 504 (0), with --prefill-retry-backoff (100ms) between them
  --between-legs        how long the prefill's answer lies before the decode request is sent (0)
  --decode-after-departure  send the decode request though the client has left between the legs, until its first token"""


def register(app: typer.Typer) -> None:
    app.command("router", context_settings=ANY_FLAGS, help="Route to simulated or real workers, plain or in P/D pairs.")(router)


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
    from windtunnel.serve.router.config import RETRIES_LIMIT, RouterConfig, SidecarConfig, prefill_address, worker_url

    readers: dict[str, Callable[[list[str]], Any]] = {
        "host": lambda values: _one("host", values),
        "port": lambda values: _number("port", _one("port", values), 65535),
        "worker-urls": lambda values: tuple(worker_url(value) for value in values),
        "pd-disaggregation": lambda values: True,
        "prefill": lambda values: (prefill_address(values[0], values[1] if len(values) > 1 else None),),
        "decode": lambda values: tuple(worker_url(value) for value in values),
        "vllm-pd-disaggregation": lambda values: True,
        "kv-connector": lambda values: _connector(_one("kv-connector", values)),
        "header-only": lambda values: True,
        "prefill-sampling": lambda values: True,
        "decode-after-departure": lambda values: True,
        "prefill-retries": lambda values: _number("prefill-retries", _one("prefill-retries", values), RETRIES_LIMIT),
        "prefill-retry-backoff": lambda values: _seconds("prefill-retry-backoff", values),
        "between-legs": lambda values: _seconds("between-legs", values),
    }
    told = _read(args, readers)
    sidecar = {field: told.pop(field) for field in _SIDECAR.values() if field in told}
    connector = told.pop("kv-connector", None)
    if connector is not None and not told.get("vllm"):
        raise ValueError("--kv-connector needs --vllm-pd-disaggregation")
    if connector == "mooncake" and sidecar:
        raise ValueError("--header-only, --between-legs and their like are the sidecar's: leave them out with mooncake")
    if told.pop("vllm", False):
        told |= {"mooncake": True} if connector == "mooncake" else {"sidecar": SidecarConfig(**sidecar)}
    elif sidecar:
        raise ValueError("--header-only, --between-legs and their like need --vllm-pd-disaggregation")
    return RouterConfig(**told)


_CONNECTORS = ("nixl", "mooncake")
_SIDECAR = {
    "header-only": "header_only",
    "prefill-sampling": "sampling",
    "decode-after-departure": "decode_after_departure",
    "prefill-retries": "retries",
    "prefill-retry-backoff": "retry_backoff_s",
    "between-legs": "between_legs_s",
}
_FIELDS = {
    "worker-urls": "workers",
    "pd-disaggregation": "pd",
    "vllm-pd-disaggregation": "vllm",
    "prefill": "prefills",
    "decode": "decodes",
    **_SIDECAR,
}
_SWITCHES = ("pd-disaggregation", "vllm-pd-disaggregation", "header-only", "prefill-sampling", "decode-after-departure")


def _read(args: Sequence[str], readers: dict[str, Callable[[list[str]], Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, values in _split(args):
        if name not in readers:
            raise ValueError(f"--{name} is not a flag; those are {', '.join('--' + one for one in readers)}")
        if name in _SWITCHES and values:
            raise ValueError(f"--{name} is a switch: it takes no value, not {' '.join(values)}")
        if not values and name not in _SWITCHES:
            raise ValueError(f"--{name} needs a value")
        value, field = readers[name](values), _FIELDS.get(name, name)
        told[field] = told[field] + value if isinstance(value, tuple) and field in told else value
    return told


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


def _connector(value: str) -> str:
    if value not in _CONNECTORS:
        raise ValueError(f"--kv-connector is {value!r}: must be one of {', '.join(_CONNECTORS)}")
    return value


def _number(name: str, value: str, most: int) -> int:
    if not value.isdigit() or int(value) > most:
        raise ValueError(f"--{name} is {value!r}: write a number from 0 to {most}")
    return int(value)


def _seconds(name: str, values: list[str]) -> float:
    from windtunnel.core.units import parse_duration_ns

    try:
        return parse_duration_ns(_one(name, values)) / 1e9
    except ValueError as error:
        raise ValueError(f"--{name}: {error}") from None
