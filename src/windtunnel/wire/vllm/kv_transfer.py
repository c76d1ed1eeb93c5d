"""`--kv-transfer-config`: from vLLM's JSON to a `KvTransferConfig` (vLLM reference §7.1). Unknown fields are errors."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from windtunnel.core.units import S
from windtunnel.core.vllm.connector.config import CONNECTORS, FAILURE_POLICIES, ROLES, KvTransferConfig, Mode
from windtunnel.core.vllm.connector.params import is_text

ABORT_TIMEOUT_S = 480
"""`VLLM_NIXL_ABORT_REQUEST_TIMEOUT` of releases between #25897 and #41383, and `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`."""

_LIMIT_S = 1_000_000

NOT_MODELLED = (
    "LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector", "MultiConnector",
    "OffloadingConnector", "SimpleCPUOffloadConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "MoRIIOConnector",
    "P2pNcclConnector", "DecodeBenchConnector", "ExampleConnector", "SharedStorageConnector",
)  # fmt: skip
"""vLLM's other connectors: known, and refused."""


class ParsedConfig(NamedTuple):
    config: KvTransferConfig
    ignored: tuple[str, ...]
    """vLLM's own fields that mean nothing here."""


def parse(text: str, *, engine_id: str, **facts: Any) -> ParsedConfig:
    """`engine_id` counts where the JSON names none; `facts` are further fields of `KvTransferConfig`, which the JSON has not.

    Raises ValueError naming the field and what it must be.
    """
    try:
        told = json.loads(text)
    except ValueError as error:
        raise ValueError(f"kv-transfer-config is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f"kv-transfer-config is {type(told).__name__}: must be a JSON object")
    extra = told.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ValueError("kv_connector_extra_config must be a JSON object")
    for name in ("kv_connector", "kv_role"):
        if name not in told:
            raise ValueError(f"{name} is missing from kv-transfer-config")
    ignored: list[str] = []
    fields = _fields(told, _FIELDS, "kv-transfer-config", ignored)
    mode = CONNECTORS[fields["connector"]]
    fields |= _fields(extra, _EXTRA[mode], f"kv_connector_extra_config of {fields['connector']}", ignored)
    if mode == "mooncake":
        facts = {"abort_timeout_ns": ABORT_TIMEOUT_S * S, **facts}
    return ParsedConfig(KvTransferConfig(**{"engine_id": engine_id, **facts, **fields}), tuple(ignored))


def _fields(told: Mapping[str, Any], known: "Mapping[str, _Field | None]", where: str, ignored: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in told.items():
        if name not in known:
            raise ValueError(f"{name} is not a field of {where}: it has {', '.join(sorted(known))}")
        field = known[name]
        if field is None:
            ignored.append(name)
        elif field.target:
            fields[field.target] = field.read(name, value)
    return fields


class _Field(NamedTuple):
    target: str
    read: Callable[[str, Any], Any]


def _connector(name: str, value: Any) -> str:
    if value in NOT_MODELLED:
        raise ValueError(f"{name} {value!r} is not modelled: use one of {', '.join(CONNECTORS)}")
    return str(_one_of(*CONNECTORS)(name, value))


def _one_of(*allowed: str) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}: must be one of {', '.join(allowed)}")
        return value

    return read


def _text(name: str, value: Any) -> str:
    if not is_text(value, 256):
        raise ValueError(f"{name} is {value!r:.80}: must be text of 1 to 256 bytes")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.80}: must be true or false")
    return value


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 30:
        raise ValueError(f"{name} is {value!r:.80}: must be an integer from 0 on")
    return value


def _workers(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
        raise ValueError(f"{name} is {value!r:.80}: must be an integer from 1 to 1024")
    return value


def _host_port(name: str, value: Any) -> str:
    """`split_host_port` of vLLM: an IPv6 host stands in brackets."""
    host, _, port = value.rpartition(":") if is_text(value, 300) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"{name} is {value!r:.80}: must be a host and a port, such as 10.0.0.1:8998")
    return str(value)


def _seconds(name: str, value: Any) -> int:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LIMIT_S:
        raise ValueError(f"{name} is {value!r:.80}: must be a number of seconds above 0 and at most {_LIMIT_S}")
    return round(value * S)


_NOTHING = _Field("", lambda _name, _value: None)

_FIELDS: Mapping[str, _Field | None] = MappingProxyType(
    {
        "kv_connector": _Field("connector", _connector),
        "kv_role": _Field("role", _one_of(*ROLES)),
        "engine_id": _Field("engine_id", _text),
        "kv_load_failure_policy": _Field("load_failure_policy", _one_of(*FAILURE_POLICIES)),
        "kv_connector_extra_config": _NOTHING,
        "kv_connector_module_path": None,
        "kv_buffer_device": None,
        "kv_buffer_size": None,
        "kv_rank": None,
        "kv_parallel_size": None,
        "kv_ip": None,
        "kv_port": None,
        "enable_permute_local_kv": None,
    }
)
_NIXL: Mapping[str, _Field | None] = MappingProxyType(
    {
        "kv_lease_duration": _Field("lease_ns", _seconds),
        "kv_recompute_threshold": _Field("kv_recompute_threshold", _count),
        "bidirectional_kv_xfer": _Field("bidirectional_kv_xfer", _flag),
        "decoder_kv_blocks_ttl": _Field("decoder_kv_blocks_ttl_ns", _seconds),
        "enforce_handshake_compat": _Field("enforce_handshake_compat", _flag),
        "push_registration_timeout": None,
        "backends": None,
        "num_threads": None,
        "enable_cross_layers_blocks": None,
    }
)
_MOONCAKE: Mapping[str, _Field | None] = MappingProxyType(
    {
        "num_workers": _Field("num_workers", _workers),
        "bootstrap_server_address": _Field("bootstrap_server_address", _host_port),
        "mooncake_protocol": None,
        "device_name": None,
    }
)
_EXTRA: Mapping[Mode, Mapping[str, _Field | None]] = MappingProxyType({"pull": _NIXL, "push": _NIXL, "mooncake": _MOONCAKE})
"""Members of `kv_connector_extra_config`."""
