"""One flag of `windtunnel serve`, and the table of one flavour."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from windtunnel.serve.flag_values import Parse


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `target` is the dotted place in ServeConfig; `live` ones can be changed while the server runs."""

    name: str
    target: str
    parse: Parse
    help: str
    live: bool = False
    many: bool = False
    switch: bool = False
    """A flag without a value, with a `--no-` twin."""
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name in `/admin/config`."""
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of one flavour. `foreign` ones exist in real servers and mean nothing here."""

    flags: tuple[Flag, ...]
    foreign: frozenset[str]
    default_port: int
    by_name: Mapping[str, Flag] = field(init=False)

    def __post_init__(self) -> None:
        named = {name: flag for flag in self.flags for name in (flag.name, *flag.aliases)}
        object.__setattr__(self, "by_name", named)

    @property
    def live(self) -> list[str]:
        return sorted(flag.key for flag in self.flags if flag.live)
