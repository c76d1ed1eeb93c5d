"""The flags of a vLLM P/D worker: its connector, and how its moves fare."""

from windtunnel.serve.flag import Flag
from windtunnel.serve.flag_values import choice, duration, integer, number, seconds, text
from windtunnel.serve.transfer import parse_fates
from windtunnel.serve.vllm_pd.settings import EXAMPLE, MEMBERS, read_json

KV_TRANSFER_FLAGS: tuple[Flag, ...] = (
    Flag("kv-transfer-config", "kv_transfer.told", read_json, f"the KV connector of a P/D worker: {EXAMPLE}"),
    *(
        Flag(f"kv-transfer-config.{name.replace('_', '-')}", f"kv_transfer.{name}", text, f"its member {name} alone")
        for name in MEMBERS
    ),
    Flag(
        "nixl-side-channel-host",
        "kv_transfer.side_channel_host",
        text,
        "where others find this engine (also VLLM_NIXL_SIDE_CHANNEL_HOST; localhost)",
    ),
    Flag(
        "nixl-side-channel-port",
        "kv_transfer.side_channel_port",
        integer(0, 65535),
        "plus the data-parallel rank; 0 picks free ones (also VLLM_NIXL_SIDE_CHANNEL_PORT; 5600)",
    ),
    Flag(
        "nixl-hold",
        "kv_transfer.hold",
        choice("lease", "timeout"),
        "how long a prefill holds blocks: a lease that heartbeats extend, or one timeout, as releases before vLLM #41383",
    ),
    Flag(
        "nixl-abort-request-timeout",
        "kv_transfer.abort_timeout_ns",
        seconds,
        "that timeout (also VLLM_NIXL_ABORT_REQUEST_TIMEOUT; 480 s)",
    ),
    Flag(
        "mooncake-host",
        "kv_transfer.mooncake_host",
        text,
        "where others find a Mooncake engine and its bootstrap server (localhost; vLLM takes the machine's own address)",
    ),
    Flag(
        "mooncake-bootstrap-port",
        "kv_transfer.mooncake_bootstrap_port",
        integer(0, 65535),
        "of a prefill; 0 picks a free one (also VLLM_MOONCAKE_BOOTSTRAP_PORT; 8998)",
    ),
    Flag(
        "mooncake-abort-request-timeout",
        "kv_transfer.mooncake_abort_timeout_ns",
        seconds,
        "how long a prefill holds blocks, and waits for a request (also VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT; 480 s)",
    ),
    Flag(
        "mooncake-connector-timeout",
        "kv_transfer.mooncake_connector_timeout_ns",
        seconds,
        "of one question to a bootstrap server (also VLLM_MOONCAKE_CONNECTOR_TIMEOUT; 30 s)",
    ),
    Flag(
        "kv-transfer-backend",
        "kv_transfer.backend",
        choice("sim", "nixl"),
        "sim models the time of a move; nixl moves real bytes (needs the package nixl)",
    ),
    Flag("nixl-block-bytes", "kv_transfer.nixl_block_bytes", integer(32, 1 << 24), "real bytes of a block (4096)"),
    Flag("transfer-bandwidth", "kv_transfer.bandwidth_gb_s", number(1e-9, 1e6), "10^9 bytes a second between P/D workers"),
    Flag("transfer-latency", "kv_transfer.transfer_latency_ns", duration, "of each read or write"),
    Flag("transfer-dead-peer", "kv_transfer.dead_peer_ns", duration, "until the transport reports a peer that has gone"),
    Flag("transfer-fates", "kv_transfer.fates", parse_fates, "shares of moves that stall, fail or lose their peer: stall=0.01"),
)
