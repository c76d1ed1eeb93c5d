"""`windtunnel serve`: the flags are the table in `serve.flags`, not typer options."""

import os

import typer

from windtunnel.cli.exits import USAGE
from windtunnel.cli.glue import ANY_FLAGS

_SWITCHES = {
    "VLLM_SERVER_DEV_MODE": "--dev-mode",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--allow-runtime-lora-updating",
    "VLLM_ENABLE_RESPONSES_API_STORE": "--enable-responses-store",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "--keep-alive-on-engine-death",
}
_VALUES = {
    "SIM_MODEL": "model",
    "VLLM_API_KEY": "api-key",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "timeout-keep-alive",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "nixl-side-channel-host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "nixl-side-channel-port",
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "nixl-abort-request-timeout",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "mooncake-bootstrap-port",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "mooncake-abort-request-timeout",
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "mooncake-connector-timeout",
    "PYTHONHASHSEED": "hash-seed",
    "POD_NAME": "pod-name",
    "POD_NAMESPACE": "pod-namespace",
}
_SGLANG_VALUES = {
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "request-state-wait-timeout",
    "SGLANG_HEALTH_CHECK_TIMEOUT": "health-check-timeout",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "health-generation",
    "SGLANG_REQ_WAITING_TIMEOUT": "req-waiting-timeout",
    "SGLANG_REQ_RUNNING_TIMEOUT": "req-running-timeout",
}
_SHARED_VALUES = ("SIM_MODEL", "PYTHONHASHSEED", "POD_NAME", "POD_NAMESPACE")


def register(app: typer.Typer) -> None:
    app.command("serve", context_settings=ANY_FLAGS, help="Run a simulated vLLM or SGLang server.")(serve)


def serve(context: typer.Context) -> None:
    # Looking for pydantic plugins costs a tenth of the start-up time, and there are none to find.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from windtunnel.serve.config import UsageError
    from windtunnel.serve.flags import parse_args

    if {"--help", "-h"} & set(context.args):
        typer.echo(help_text(engine_of(context.args)))
        return
    try:
        parsed = parse_args([*context.args, *environment_flags(context.args)], environment_sources(context.args))
    except UsageError as error:
        typer.echo(f"windtunnel serve: {error}", err=True)
        raise typer.Exit(USAGE) from None
    for warning in parsed.warnings:
        typer.echo(f"warning: {warning}", err=True)
    from windtunnel.serve.server import run

    try:
        run(parsed.config)
    except UsageError as error:
        typer.echo(f"windtunnel serve: {error}", err=True)
        raise typer.Exit(USAGE) from None


def environment_flags(args: list[str]) -> list[str]:
    """The environment variables of the real server that have a flag here."""
    if engine_of(args) == "sglang":
        return _value_flags(args)
    flags = []
    for variable, flag in _SWITCHES.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            flags.append(flag)
    flags += _value_flags(args)
    if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1").lower() in ("0", "false"):
        flags.append("--kv-events-hashes=bytes")
    return flags


def environment_sources(args: list[str]) -> dict[str, str]:
    """Flag → the environment variable that gives its value."""
    told = {flag: variable for variable, flag in _variables(args).items() if os.environ.get(variable)}
    return {flag: variable for flag, variable in told.items() if not named(flag, args)}


def _value_flags(args: list[str]) -> list[str]:
    return [f"--{flag}={os.environ[variable]}" for flag, variable in environment_sources(args).items()]


def _variables(args: list[str]) -> dict[str, str]:
    """Environment variable → flag."""
    if engine_of(args) != "sglang":
        return _VALUES
    from windtunnel.serve.sglang.disagg_flags import ENVIRONMENT

    shared = {name: _VALUES[name] for name in _SHARED_VALUES}
    return {**shared, **_SGLANG_VALUES, **ENVIRONMENT}


def engine_of(args: list[str]) -> str:
    """Whose flags these are."""
    for at, arg in enumerate(args):
        if arg.startswith("--engine="):
            return arg.partition("=")[2]
        if arg == "--engine" and at + 1 < len(args):
            return args[at + 1]
    return "vllm"


def named(flag: str, args: list[str]) -> bool:
    """Whether the command line names this flag: it beats the environment. A model may come without its flag."""
    if flag == "model" and args and not args[0].startswith("-"):
        return True
    names = ("model", "model-path") if flag == "model" else (flag,)
    return any(arg == f"--{name}" or arg.startswith(f"--{name}=") for arg in args for name in names)


def help_text(engine: str = "vllm") -> str:
    from windtunnel.serve.flags import table_of

    lines = ["usage: windtunnel serve [MODEL] [--flag value]…", ""]
    lines.append("Flags (* can be changed at run time through POST /admin/config):")
    for flag in table_of(engine).flags:
        names = ", ".join(f"--{name}" for name in (flag.name, *flag.aliases))
        lines.append(f"  {names}{' *' if flag.live else ''}\n      {flag.help}")
    return "\n".join(lines)
