"""What `windtunnel up` starts: servers, each with its own arguments, and perhaps a router. Presets, or a TOML file."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

FILE_LIMIT_BYTES = 1024 * 1024
SERVERS_LIMIT = 64
RouterKind = Literal["windtunnel", "sglang-router", "smg", "vllm-router", "none"]
ROUTERS: tuple[RouterKind, ...] = ("windtunnel", "sglang-router", "smg", "vllm-router", "none")
Pairing = Literal["sglang", "vllm", "vllm-mooncake"]
PAIRINGS: tuple[Pairing, ...] = ("sglang", "vllm", "vllm-mooncake")
Role = Literal["worker", "prefill", "decode"]
PRESETS = ("vllm", "sglang", "sglang-pd", "vllm-pd", "vllm-pd-mooncake")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_PLACE = re.compile(r"\{(?:([A-Za-z][A-Za-z0-9_-]*)\.)?(port|bootstrap_port)\}")


class UpError(ValueError):
    """A plan that cannot be started. The message names the key."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One `windtunnel serve`. In `args` `{port}`, `{bootstrap_port}` and `{NAME.port}` are filled in."""

    name: str
    args: tuple[str, ...]
    role: Role = "worker"
    port: int = 0
    """0: a free one."""
    bootstrap_port: int = 0


@dataclass(frozen=True, slots=True)
class UpPlan:
    servers: tuple[ServerPlan, ...]
    router: RouterKind = "windtunnel"
    router_port: int = 0
    router_args: tuple[str, ...] = ()
    pairing: Pairing = "sglang"
    """How a prefill and a decode go together: by SGLang's bootstrap, or by vLLM's `kv_transfer_params` (NIXL, Mooncake)."""
    liveness_s: float = 10.0
    """How often an orchestrator would ask each server's /health; 0: never."""

    def __post_init__(self) -> None:
        names = [server.name for server in self.servers]
        if not 0 < len(names) <= SERVERS_LIMIT:
            raise UpError(f"server: {len(names)} servers; 1 to {SERVERS_LIMIT} are allowed")
        for name in names:
            if not _NAME.fullmatch(name) or names.count(name) > 1:
                raise UpError(f"server.name: {name!r} must be a word of its own, such as prefill or decode-2")

    @property
    def bootstraps(self) -> bool:
        """A router is told the bootstrap port of each prefill."""
        return self.pairing != "vllm"

    @property
    def pd(self) -> bool:
        return any(server.role != "worker" for server in self.servers)


_COMMON = ("--model", "windtunnel", "--port", "{port}", "--disable-access-log")


def _worker(engine: str, number: int) -> ServerPlan:
    return ServerPlan(f"{engine}-{number + 1}", ("--engine", engine, *_COMMON))


def _leg(role: Literal["prefill", "decode"], number: int) -> ServerPlan:
    args = ["--engine", "sglang", *_COMMON, "--disaggregation-mode", role]
    if role == "prefill":
        args += ["--disaggregation-bootstrap-port", "{bootstrap_port}"]
    return ServerPlan(role if not number else f"{role}-{number + 1}", tuple(args), role)


def _vllm_leg(role: Literal["prefill", "decode"], number: int) -> ServerPlan:
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    config = f'{{"kv_connector": "NixlConnector", "kv_role": "{kv_role}"}}'
    args = ("--engine", "vllm", *_COMMON, "--kv-transfer-config", config, "--nixl-side-channel-port", "0")
    return ServerPlan(role if not number else f"{role}-{number + 1}", args, role)


def _mooncake_leg(role: Literal["prefill", "decode"], number: int) -> ServerPlan:
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    config = f'{{"kv_connector": "MooncakeConnector", "kv_role": "{kv_role}"}}'
    engine_id = ("--kv-transfer-config.engine-id", f"{role}-{{port}}")  # what smg is told of it
    port = ("--mooncake-bootstrap-port", "{bootstrap_port}") if role == "prefill" else ()
    args = ("--engine", "vllm", *_COMMON, "--kv-transfer-config", config, *engine_id, *port)
    return ServerPlan(role if not number else f"{role}-{number + 1}", args, role)


_LEGS: Mapping[str, tuple[Callable[[Literal["prefill", "decode"], int], ServerPlan], Pairing]] = {
    "sglang-pd": (_leg, "sglang"),
    "vllm-pd": (_vllm_leg, "vllm"),
    "vllm-pd-mooncake": (_mooncake_leg, "vllm-mooncake"),
}


def preset(name: str, *, workers: int = 2, prefills: int = 1, decodes: int = 1) -> UpPlan:
    """Raises UpError for a name that is none."""
    if name in ("vllm", "sglang"):
        return UpPlan(tuple(_worker(name, number) for number in range(workers)))
    if name in _LEGS:
        leg, pairing = _LEGS[name]
        legs = [leg("prefill", number) for number in range(prefills)] + [leg("decode", number) for number in range(decodes)]
        return UpPlan(tuple(legs), pairing=pairing)
    raise UpError(f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a file")


def with_args(plan: UpPlan, extra: Mapping[str, Sequence[str]]) -> UpPlan:
    """More arguments for all servers (""), for those of one role or name, or for the router (`router`)."""
    known = {"", "router", *(one for server in plan.servers for one in (server.role, server.name))}
    for key in extra:
        if key not in known:
            raise UpError(f"{key}: no server has this role or name")
    servers = [
        replace(server, args=server.args + tuple(word for key in ("", server.role, server.name) for word in extra.get(key, ())))
        if server.role != server.name
        else replace(server, args=server.args + tuple(word for key in ("", server.role) for word in extra.get(key, ())))
        for server in plan.servers
    ]
    return replace(plan, servers=tuple(servers), router_args=plan.router_args + tuple(extra.get("router", ())))


_SERVER_KEYS = {"name": str, "args": list, "role": str, "port": int, "bootstrap_port": int}
_ROUTER_KEYS = {"kind": str, "port": int, "args": list, "pairing": str}


def read(path: Path) -> UpPlan:
    """A TOML file: `[[server]]` tables and perhaps a `[router]`. Raises UpError, OSError."""
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise UpError(f"{path}: over {FILE_LIMIT_BYTES} bytes")
    try:
        told = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UpError(f"{path}: not TOML: {error}") from None
    _check_keys(told, {"server": list, "router": dict, "liveness_s": (int, float)}, str(path))
    servers = [_server(item, f"{path}: server[{number}]") for number, item in enumerate(told.get("server", []))]
    router = told.get("router", {"kind": "none"})
    _check_keys(router, _ROUTER_KEYS, f"{path}: router")
    kind = router.get("kind", "windtunnel")
    check_router(kind, f"{path}: router.kind")
    pairing = router.get("pairing", "sglang")
    if pairing not in PAIRINGS:
        raise UpError(f"{path}: router.pairing is {pairing!r}: must be one of {', '.join(PAIRINGS)}")
    args = tuple(str(word) for word in router.get("args", ()))
    return UpPlan(tuple(servers), kind, router.get("port", 0), args, pairing, float(told.get("liveness_s", 0)))


def check_router(kind: str, where: str) -> None:
    """Raises UpError."""
    if kind not in ROUTERS:
        raise UpError(f"{where} is {kind!r}: must be one of {', '.join(ROUTERS)}")


def _server(item: Any, where: str) -> ServerPlan:
    if not isinstance(item, dict):
        raise UpError(f"{where}: must be a table")
    _check_keys(item, _SERVER_KEYS, where)
    role = item.get("role", "worker")
    if role not in ("worker", "prefill", "decode"):
        raise UpError(f"{where}.role is {role!r}: must be worker, prefill or decode")
    if "name" not in item or "args" not in item:
        raise UpError(f"{where}: name and args are needed")
    args = tuple(str(word) for word in item["args"])
    return ServerPlan(item["name"], args, role, item.get("port", 0), item.get("bootstrap_port", 0))


def _check_keys(told: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    for key, value in told.items():
        if key not in known:
            raise UpError(f"{where}.{key}: not a key; those are {', '.join(known)}")
        if not isinstance(value, known[key]):
            raise UpError(f"{where}.{key}: {value!r} has the wrong type")


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of every server."""

    ports: Mapping[str, int]
    bootstrap: Mapping[str, int] = field(default_factory=dict)

    def fill(self, word: str, own: str) -> str:
        """Raises UpError for a placeholder that does not exist."""

        def one(found: re.Match[str]) -> str:
            name, kind = found[1] or own, found[2]
            table = self.ports if kind == "port" else self.bootstrap
            if name not in table:
                raise UpError(f"{found[0]}: no server is called {name!r}")
            return str(table[name])

        return _PLACE.sub(one, word)
