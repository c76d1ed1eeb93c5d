"""`windtunnel serve`: the flags are the table in `serve.flags`, not typer options."""

import os

import typer

from windtunnel.cli.exits import USAGE

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
    "PYTHONHASHSEED": "hash-seed",
    "POD_NAME": "pod-name",
    "POD_NAMESPACE": "pod-namespace",
}
_ANY_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    app.command("serve", context_settings=_ANY_FLAGS, help="Run a simulated vLLM or SGLang server.")(serve)


def serve(context: typer.Context) -> None:
    # Looking for pydantic plugins costs a tenth of the start-up time, and there are none to find.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from windtunnel.serve.config import UsageError
    from windtunnel.serve.flags import parse_args

    if {"--help", "-h"} & set(context.args):
        typer.echo(help_text())
        return
    try:
        parsed = parse_args([*context.args, *environment_flags(context.args)])
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
    flags = []
    for variable, flag in _SWITCHES.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            flags.append(flag)
    for variable, flag in _VALUES.items():
        if os.environ.get(variable) and not named(flag, args):
            flags += [f"--{flag}={os.environ[variable]}"]
    return flags


def named(flag: str, args: list[str]) -> bool:
    """Whether the command line names this flag: it beats the environment. A model may come without its flag."""
    if flag == "model" and args and not args[0].startswith("-"):
        return True
    return any(arg == f"--{flag}" or arg.startswith(f"--{flag}=") for arg in args)


def help_text() -> str:
    from windtunnel.serve.flags import FLAGS

    lines = ["usage: windtunnel serve [MODEL] [--flag value]…", ""]
    lines.append("Flags (* can be changed at run time through POST /admin/config):")
    for flag in FLAGS:
        names = ", ".join(f"--{name}" for name in (flag.name, *flag.aliases))
        lines.append(f"  {names}{' *' if flag.live else ''}\n      {flag.help}")
    return "\n".join(lines)
