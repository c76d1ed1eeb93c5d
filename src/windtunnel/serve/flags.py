"""The settings of `windtunnel serve`, from the command line, a file or `/admin/config` to a configuration."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from windtunnel.serve.config import TOO_DEEP, ServeConfig, UsageError
from windtunnel.serve.config_file import read_config_file
from windtunnel.serve.flag import Flag, FlagTable
from windtunnel.serve.flag_checks import check
from windtunnel.serve.foreign_flags import SHORT_FLAGS
from windtunnel.serve.vllm_flags import VLLM_FLAGS


def table_of(engine: str) -> FlagTable:
    if engine != "sglang":
        return VLLM_FLAGS
    from windtunnel.serve.sglang.flags import SGLANG_FLAGS

    return SGLANG_FLAGS


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    config: ServeConfig
    warnings: tuple[str, ...]


def parse_args(args: Sequence[str], sources: Mapping[str, str] = MappingProxyType({})) -> ParsedFlags:
    """Command-line arguments to a configuration.

    Raises UsageError that names the flag, or what `sources` has for it: the environment variable that it comes from.
    """
    values: dict[str, Any] = {}
    named: dict[str, str] = {}
    warnings: list[str] = []
    told = list(_split(args))
    table = table_of(_engine(told))
    for name, given in _with_file(told, table):
        flag, value = _lookup(name, given, table)
        if flag is None:
            warnings.append(f"--{name} is a flag of the real server that means nothing here: ignored")
            continue
        if named.setdefault(flag.target, name) != name:
            warnings.append(f"--{named[flag.target]} and --{name} set the same thing: the last one holds")
            named[flag.target] = name
        values.update(_targets(flag, _parse(flag, sources.get(name, f"--{name}"), value)))
    if "model" not in values:
        raise UsageError("--model is missing: windtunnel serve --model NAME")
    values.setdefault("port", table.default_port)
    return ParsedFlags(check(apply_values(ServeConfig(model=values["model"]), values)), tuple(warnings))


Given = Sequence[tuple[str, list[Any]]]


def _engine(given: Given) -> str:
    """Which table is meant: the command line's or else the file's `engine`."""
    files = [values for name, values in given if name == "config"]
    named = [values for name, values in given if name == "engine"]
    if not named and len(files) == 1 and len(files[0]) == 1:
        named = [values for name, values in read_config_file(files[0][0]) if name == "engine"]
    return str(named[-1][0]) if named and named[-1] else "vllm"


def _with_file(given: Given, table: FlagTable) -> Given:
    """What `--config` names comes first, so that the command line beats it."""
    files = [values for name, values in given if name == "config"]
    if not files:
        return given
    if len(files) > 1 or len(files[0]) != 1:
        raise UsageError("--config takes one file: a YAML or TOML map of flag names to values")
    rest = [(name, values) for name, values in given if name != "config"]
    told = {table.by_name[name].target for name, _ in rest if name in table.by_name}
    return [*(item for item in read_config_file(files[0][0]) if _target(item[0], table) not in told), *rest]


def _target(name: str, table: FlagTable) -> str | None:
    flag = table.by_name.get(name)
    return None if flag is None else flag.target


def live_changes(config: ServeConfig, changes: Mapping[str, Any]) -> ServeConfig:
    """The configuration after a POST to `/admin/config`: all changes or, with UsageError, none."""
    values = {}
    table = table_of(config.engine)
    for key, value in changes.items():
        flag = table.by_name.get(key.replace("_", "-"))
        if flag is None or not flag.live:
            names = ", ".join(table.live)
            raise UsageError(f"{key}: not a setting that can be changed while the server runs; those are {names}")
        values[flag.target] = _parse(flag, key, value)
    changed = check(apply_values(config, values))
    if config.scheduler.kv_offloading_gib and changed.pacing.gpu_model != config.pacing.gpu_model:
        raise UsageError(
            f"gpu_model: {config.pacing.gpu_model} says how many blocks --kv-offloading-size holds, and those cannot change "
            "while the server runs; start it with --kv-offloading-blocks instead"
        )
    return changed


def apply_values(config: ServeConfig, values: Mapping[str, Any]) -> ServeConfig:
    """`config` with dotted targets replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for target, value in values.items():
        section, _, name = target.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    nested = {section: replace(getattr(config, section), **changes) for section, changes in sections.items()}
    return replace(config, **top, **nested)


def _split(args: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """(flag name, its values). A leading bare word is the model, as in `vllm serve MODEL`."""
    rest = list(args)
    if rest and not rest[0].startswith("--"):
        yield "model", [rest.pop(0)]
    while rest:
        head = rest.pop(0)
        head = f"--{SHORT_FLAGS[head]}" if head in SHORT_FLAGS else head
        if not head.startswith("--"):
            raise UsageError(f"{head!r} stands alone: a value must follow a flag")
        name, has_value, value = head[2:].partition("=")
        values = [value] if has_value else []
        while not has_value and rest and not rest[0].startswith("--") and rest[0] not in SHORT_FLAGS:
            values.append(rest.pop(0))
        yield name.replace("_", "-"), values


def _lookup(name: str, given: list[str], table: FlagTable) -> tuple[Flag | None, Any]:
    flag = table.by_name.get(name)
    positive = table.by_name.get(name.removeprefix("no-"))
    if flag is None and positive is not None and positive.switch:
        return positive, False
    if flag is None:
        if name.partition(".")[0].removeprefix("no-") in table.foreign:
            return None, None
        near = get_close_matches(name, [*table.by_name, *table.foreign], n=1)
        raise UsageError(f"--{name} is not a flag" + (f"; did you mean --{near[0]}?" if near else ""))
    return flag, _value(flag, name, given)


def _targets(flag: Flag, value: Any) -> Mapping[str, Any]:
    """Where a parsed value goes; a flag with the target `section.*` sets several members of its section."""
    section, star, _ = flag.target.partition("*")
    return {section + name: member for name, member in value.items()} if star else {flag.target: value}


def _value(flag: Flag, name: str, given: list[str]) -> Any:
    if flag.switch and not given:
        return True
    if not given:
        raise UsageError(f"--{name} needs a value: {flag.help}")
    if flag.many:
        return given
    if len(given) > 1:
        raise UsageError(f"--{name} takes one value, not {len(given)}: {' '.join(given)}")
    return given[0]


def _parse(flag: Flag, name: str, value: Any) -> Any:
    try:
        return flag.parse(value)
    except RecursionError:
        raise UsageError(f"{name}: {TOO_DEEP}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{name}: {error}") from None
