"""`--kv-events-config`: where the KV events of a server go. Names, defaults and rules are vLLM's (reference §6.1).

What SGLang has instead is in `windtunnel.serve.sglang.kv_config`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import msgspec

from windtunnel.wire.kv_events import EventFormat, HashForm

Count = Annotated[int, msgspec.Meta(ge=1)]

_BIND_MARKS = ("*", "::")
_BIND_SCHEMES = ("ipc://", "inproc://")
_ENDPOINT = re.compile(r"tcp://(?:\*|\[[0-9A-Fa-f:.]+\]|[^:/\[\]*]+|::):(?P<port>\d{1,5})$|(?:ipc|inproc)://.+$")
_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """The first eight are the members of `--kv-events-config`; `/kv_event_sources` shows them."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None: `zmq` while events are enabled."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    """Shown only: events leave with their step and wait in no queue."""
    topic: str = ""
    form: EventFormat = "map"
    hashes: HashForm = "int"
    batch_events: int = 1
    """Batches wait for so many events, and at most a second, as in llm-d-inference-sim; 1: each step is a batch."""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def source(self, endpoint: str, replay_endpoint: str | None) -> dict[str, Any]:
        """One entry of `/kv_event_sources`, with the endpoints of one rank."""
        shown = {name: getattr(self, name) for name in _MEMBERS}
        return {**shown, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay_endpoint}


_MEMBERS = tuple(item.name for item in fields(KvEventsConfig) if item.name not in ("form", "hashes", "batch_events"))
_EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'


def binds(endpoint: str) -> bool:
    """Whether a publisher binds this endpoint; it connects to others (vLLM reference §6.1)."""
    return any(mark in endpoint for mark in _BIND_MARKS) or endpoint.startswith(_BIND_SCHEMES)


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: its port plus the rank (0 stays 0: any free one), or its name with `_dp<rank>`."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank if int(port) else 0}"


def parse_endpoint(value: Any) -> str:
    """Raises ValueError for what no socket could use."""
    found = _ENDPOINT.match(value) if isinstance(value, str) else None
    if found is None or int(found["port"] or 0) > _PORT_MAX:
        raise ValueError(f"{value!r} is not an endpoint: write tcp://HOST:PORT, tcp://*:PORT, ipc://PATH or inproc://NAME")
    return str(value)


def parse_kv_events(value: Any) -> dict[str, Any]:
    """The members that a JSON object sets. Raises ValueError that names the member."""
    return parse_members(value, _MEMBERS, _EXAMPLE)


def parse_members(value: Any, names: Sequence[str], example: str) -> dict[str, Any]:
    """The members of a JSON object that may have those of `names`. Raises ValueError that names the member."""
    members = _object(value, example)
    unknown = sorted(members.keys() - set(names))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such member; those are {', '.join(names)}")
    try:
        msgspec.convert(members, KvEventsConfig)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    for name in ("endpoint", "replay_endpoint"):
        if members.get(name) is not None:
            _named(name, members[name])
    return members


def _named(name: str, value: Any) -> None:
    try:
        parse_endpoint(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _object(value: Any, example: str) -> dict[str, Any]:
    try:
        members = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{value!r} is not JSON ({error})") from None
    if not isinstance(members, dict):
        raise ValueError(f"{value!r} is not an object: write {example}")
    return members


def check_kv_events(config: KvEventsConfig, ranks: int) -> None:
    """What no single member can see. Raises ValueError."""
    if config.publishes and not binds(config.endpoint) and config.endpoint.endswith(":0"):
        raise ValueError(
            f"endpoint {config.endpoint} has no port to connect to: 0 works only where the publisher binds (tcp://*:0)"
        )
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, name) or ""
        _, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and int(port) + ranks - 1 > _PORT_MAX:
            raise ValueError(f"{name} {endpoint} leaves no port for each of {ranks} data-parallel ranks")
