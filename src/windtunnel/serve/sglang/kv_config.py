"""`--kv-events-config` as SGLang has it: `publisher` is the switch (SGLang reference §8.2)."""

import json
from typing import Any

from windtunnel.serve.kv_config import KvEventsConfig, parse_members

MEMBERS = ("publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic", "format")
_EXAMPLE = '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'


def parse_sglang_kv_events(value: Any) -> dict[str, Any]:
    """The members that a JSON object sets, under the names of `KvEventsConfig`. Raises ValueError that names the member."""
    members = dict(parse_members(value, MEMBERS, _EXAMPLE))
    form = members.pop("format", "default")
    if form != "default":
        raise ValueError(f"format: {form!r} is not simulated; write default, or leave it out")
    return {**members, "enable_kv_cache_events": members.get("publisher") == "zmq"}


def as_argument(config: KvEventsConfig) -> str | None:
    """The argument that `/server_info` shows; None while events are off."""
    if not config.publishes:
        return None
    return json.dumps({name: getattr(config, name) for name in MEMBERS if name != "format"})
