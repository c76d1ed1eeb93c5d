"""`--kv-transfer-config` and what goes with it, parsed once (vLLM reference §7.1, §7.2). Times as vLLM has them."""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from windtunnel.core.units import MS, US, S
from windtunnel.core.vllm.connector.config import CONNECTORS, MOONCAKE, KvTransferConfig, compatibility_hash
from windtunnel.wire.vllm.kv_transfer import ABORT_TIMEOUT_S, ParsedConfig, parse

Hold = Literal["lease", "timeout"]
MEMBERS = ("kv_connector", "kv_role", "engine_id", "kv_load_failure_policy")
"""Those of `--kv-transfer-config` that may come one by one, as `--kv-transfer-config.kv_role`."""
EXAMPLE = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


@dataclass(frozen=True, slots=True)
class KvTransferSettings:
    """Nothing here is divided by the time scale yet."""

    told: Mapping[str, Any] | None = None
    """The JSON as it came; None: no KV connector. The next four beat its members."""
    kv_connector: str | None = None
    kv_role: str | None = None
    engine_id: str | None = None
    """None: a random one for each start."""
    kv_load_failure_policy: str | None = None
    side_channel_host: str = "localhost"
    side_channel_port: int = 5600
    """Plus the data-parallel rank; 0 takes free ones."""
    hold: Hold = "lease"
    """How long blocks are held: a lease with heartbeats, or one timeout as in the releases before #41383."""
    abort_timeout_ns: int = ABORT_TIMEOUT_S * S
    mooncake_host: str = "localhost"
    """Where others find a Mooncake engine and its bootstrap server; vLLM takes the machine's own address."""
    mooncake_bootstrap_port: int = 8998
    """0 takes a free one."""
    mooncake_abort_timeout_ns: int = ABORT_TIMEOUT_S * S
    mooncake_connector_timeout_ns: int = 30 * S
    """Of one question to a bootstrap server."""
    backend: Literal["sim", "nixl"] = "sim"
    nixl_block_bytes: int = 4096
    """Real bytes of a block; a real KV cache has some hundred times as many."""
    bandwidth_gb_s: float = 10.0
    transfer_latency_ns: int = 100 * US
    dead_peer_ns: int = 50 * MS
    """NIXL over UCX reports a killed peer after 16 to 70 ms (clients §8)."""
    fates: tuple[tuple[str, float], ...] = ()

    @property
    def members(self) -> dict[str, Any]:
        """The JSON that vLLM would make of all of it."""
        single = {name: getattr(self, name) for name in MEMBERS}
        return {**(self.told or {}), **{name: value for name, value in single.items() if value is not None}}

    @property
    def on(self) -> bool:
        return bool(self.members)

    def parsed(self, engine_id: str) -> ParsedConfig:
        """`engine_id` counts where none was told. Raises ValueError that names the member."""
        parsed = parse(json.dumps(self.members), engine_id=engine_id)
        if parsed.config.mooncake and self.backend == "nixl":
            raise ValueError(f"kv_connector {MOONCAKE!r} moves no real bytes here: leave --kv-transfer-backend at sim")
        return parsed


def read_json(value: Any) -> dict[str, Any]:
    """The flag's value. Raises ValueError."""
    try:
        told = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{value!r} is not JSON ({error})") from None
    if not isinstance(told, dict) or not told:
        raise ValueError(f"{value!r} is not an object with members: write {EXAMPLE}")
    return told


def core_config(
    settings: KvTransferSettings,
    *,
    rank: int | None,
    host: str,
    port: int,
    model: str,
    version: str,
    block_size: int,
    kv_bytes_per_token: int,
    time_scale: float,
    change: Callable[[KvTransferConfig], KvTransferConfig],
) -> KvTransferConfig:
    """What one rank's engine gets. `rank` is None where there is one only, and `host` and `port` are where others find it.
    `change` is the seam for planted defects, before times are scaled.

    Raises ValueError.
    """
    told = settings.parsed(str(uuid.uuid4())).config
    nixl_timeout_ns = settings.abort_timeout_ns if settings.hold == "timeout" else None
    config = replace(
        told,
        engine_id=told.engine_id if rank is None else f"{told.engine_id}_dp{rank}",
        side_channel_host=host if told.mooncake else settings.side_channel_host,
        side_channel_port=port,
        abort_timeout_ns=settings.mooncake_abort_timeout_ns if told.mooncake else nixl_timeout_ns,
        compatibility_hash=compatibility_hash(
            model=model,
            version=version,
            block_size=block_size,
            kv_bytes_per_token=kv_bytes_per_token,
            mode=CONNECTORS[told.connector],
        ),
        kv_bytes_per_token=kv_bytes_per_token,
    )
    return change(config).scaled(time_scale)
