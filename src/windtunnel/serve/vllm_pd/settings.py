"""`--kv-transfer-config` and what goes with it, parsed once (vLLM reference §7.1, §7.2). Times as vLLM has them."""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from windtunnel.core.units import MS, US, S
from windtunnel.core.vllm.connector.config import CONNECTORS, FAILURE_POLICIES, ROLES, KvTransferConfig, compatibility_hash

Hold = Literal["lease", "timeout"]
DEFAULT_PORT = 5600


@dataclass(frozen=True, slots=True)
class KvTransferSettings:
    """Nothing here is divided by the time scale yet."""

    connector: str | None = None
    """None: no KV connector."""
    role: str = "kv_both"
    engine_id: str | None = None
    """None: a random one for each start."""
    load_failure_policy: str = "fail"
    lease_ns: int = 30 * S
    kv_recompute_threshold: int = 64
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl_ns: int = 480 * S
    enforce_handshake_compat: bool = True
    side_channel_host: str = "localhost"
    side_channel_port: int = DEFAULT_PORT
    """Plus the data-parallel rank; 0 takes free ones."""
    hold: Hold = "lease"
    """How long blocks are held: a lease with heartbeats, or one timeout as in the releases before #41383."""
    abort_timeout_ns: int = 480 * S
    bandwidth_gb_s: float = 10.0
    transfer_latency_ns: int = 100 * US
    dead_peer_ns: int = 50 * MS
    """NIXL over UCX reports a killed peer after 16 to 70 ms (clients §8)."""
    fates: tuple[tuple[str, float], ...] = ()

    @property
    def on(self) -> bool:
        return self.connector is not None


def core_config(
    settings: KvTransferSettings,
    *,
    rank: int,
    ranks: int,
    port: int,
    model: str,
    version: str,
    block_size: int,
    kv_bytes_per_token: int,
    time_scale: float,
) -> KvTransferConfig:
    """What one rank's engine gets. `port` is the one that its side channel listens on. Raises ValueError."""
    assert settings.connector is not None
    engine_id = settings.engine_id or str(uuid.uuid4())
    mode = CONNECTORS[settings.connector]
    told = KvTransferConfig(
        engine_id=engine_id if ranks == 1 else f"{engine_id}_dp{rank}",
        connector=settings.connector,
        role=settings.role,  # type: ignore[arg-type]  # one of ROLES: the flag's parser says so
        side_channel_host=settings.side_channel_host,
        side_channel_port=port,
        load_failure_policy=settings.load_failure_policy,  # type: ignore[arg-type]  # as the role
        lease_ns=settings.lease_ns,
        abort_timeout_ns=settings.abort_timeout_ns if settings.hold == "timeout" else None,
        kv_recompute_threshold=settings.kv_recompute_threshold,
        bidirectional_kv_xfer=settings.bidirectional_kv_xfer,
        decoder_kv_blocks_ttl_ns=settings.decoder_kv_blocks_ttl_ns,
        enforce_handshake_compat=settings.enforce_handshake_compat,
        compatibility_hash=compatibility_hash(
            model=model, version=version, block_size=block_size, kv_bytes_per_token=kv_bytes_per_token, mode=mode
        ),
        kv_bytes_per_token=kv_bytes_per_token,
    )
    return told.scaled(time_scale)


# The JSON


def _one_of(allowed: Any) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
        return str(value)

    return parse


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a non-empty text")
    return value


def _seconds(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 10**9:
        raise ValueError(f"{value!r} is not a number of seconds above 0")
    return round(value * 1e9)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0")
    return value


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


Member = tuple[str, Callable[[Any], Any]]

KV_TRANSFER_MEMBERS: Mapping[str, Member] = MappingProxyType(
    {
        "kv_connector": ("connector", _one_of(CONNECTORS)),
        "kv_role": ("role", _one_of(ROLES)),
        "engine_id": ("engine_id", _text),
        "kv_load_failure_policy": ("load_failure_policy", _one_of(FAILURE_POLICIES)),
    }
)
_EXTRA: Mapping[str, Member] = MappingProxyType(
    {
        "kv_lease_duration": ("lease_ns", _seconds),
        "kv_recompute_threshold": ("kv_recompute_threshold", _count),
        "bidirectional_kv_xfer": ("bidirectional_kv_xfer", _switch),
        "decoder_kv_blocks_ttl": ("decoder_kv_blocks_ttl_ns", _seconds),
        "enforce_handshake_compat": ("enforce_handshake_compat", _switch),
    }
)
_MEANINGLESS = frozenset(
    """kv_buffer_device kv_buffer_size kv_rank kv_parallel_size kv_ip kv_port kv_connector_module_path
    enable_permute_local_kv""".split()
)
_MEANINGLESS_EXTRA = frozenset(["backends", "backend_params", "num_threads", "use_host_buffer"])
"""Members of vLLM's own that change nothing here."""
_EXTRA_NAME = "kv_connector_extra_config"
EXAMPLE = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


def parse_kv_transfer(value: Any) -> dict[str, Any]:
    """The settings that a JSON object makes. Raises ValueError that names the member."""
    members = _object(value, EXAMPLE)
    extra = _object(members.pop(_EXTRA_NAME, None) or {}, '{"kv_lease_duration": 30}')
    for name, needed in (("kv_connector", bool(members)), ("kv_role", "kv_connector" in members)):
        if needed and members.get(name) is None:
            raise ValueError(f"{name} is missing: write {EXAMPLE}")
    return _read(members, KV_TRANSFER_MEMBERS, _MEANINGLESS | {_EXTRA_NAME}, "") | _read(
        extra, _EXTRA, _MEANINGLESS_EXTRA, f"{_EXTRA_NAME}."
    )


def _read(members: Mapping[str, Any], known: Mapping[str, Member], ignored: frozenset[str], where: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, value in members.items():
        if name not in known and name not in ignored:
            raise ValueError(f"{where}{name}: no such member; those are {', '.join(sorted({*known, *ignored}))}")
        if name in known and value is not None:
            field, parse = known[name]
            try:
                told[field] = parse(value)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}{name}: {error}") from None
    return told


def _object(value: Any, example: str) -> dict[str, Any]:
    try:
        members = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{value!r} is not JSON ({error})") from None
    if not isinstance(members, dict):
        raise ValueError(f"{value!r} is not an object: write {example}")
    return dict(members)
