"""`kv_transfer_params`: what a router carries from one engine to the other (vLLM reference §7.2).

The values come from strangers: whatever is not of its kind counts as missing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.seam import Peer

MAX_BLOCKS = 1 << 20
"""Blocks that one request may name."""
MAX_BLOCK = (1 << 31) - 1
"""The greatest id of a block."""
ID_LIMIT_BYTES = 1024
"""Of a request's or an engine's id."""
HOST_LIMIT_BYTES = 255
MAX_RANKS = 1024
"""Tensor- or data-parallel, of one engine or server."""


class Remote(NamedTuple):
    """The end at which a request's KV lies."""

    peer: Peer
    request_id: str
    """The other engine's own id; Mooncake: the transfer's."""
    blocks: tuple[int, ...]
    tokens: int | None = None
    """How many tokens these hold, as far as it was told."""
    expiry_ns: int | None = None
    """When a decode gives them up; on a clock that all engines of one machine share."""


NOWHERE = Remote(Peer("", "", 0), "", ())
"""Parameters that ask for a prefill's KV and name none."""


def asks_prefill(params: Mapping[str, Any] | None) -> bool:
    """`do_remote_prefill`: somebody has computed the prompt already."""
    return bool(params and params.get("do_remote_prefill"))


def asks_decode(params: Mapping[str, Any] | None) -> bool:
    """`do_remote_decode`: somebody else will go on from here."""
    return bool(params and params.get("do_remote_decode"))


def is_text(told: object, limit_bytes: int) -> TypeGuard[str]:
    """Text that is not empty and can be sent: JSON allows lone surrogates, which have no bytes."""
    if not isinstance(told, str) or not 0 < len(told) <= limit_bytes:
        return False
    try:
        return len(told.encode()) <= limit_bytes
    except UnicodeEncodeError:
        return False


def remote_of(params: Mapping[str, Any] | None, *, blocks_needed: bool = True) -> Remote | None:
    """Where the KV lies; None unless every field that is needed is there and of its kind.

    Without `blocks_needed` (push) the prefill's blocks may be missing.
    """
    if not params:
        return None
    peer, request_id = _peer(params), params.get("remote_request_id")
    blocks = _flat(params.get("remote_block_ids"))
    if peer is None or not is_text(request_id, ID_LIMIT_BYTES):
        return None
    if blocks is None or (blocks_needed and not blocks):
        return None
    expiry = params.get("remote_blocks_expiry_time")
    tokens = params.get("remote_num_tokens")
    return Remote(
        peer,
        request_id,
        blocks,
        tokens if _is_int(tokens) and tokens >= 0 else None,
        round(expiry * 1e9) if isinstance(expiry, int | float) and 0 <= expiry < 1 << 40 else None,
    )


def transfer_of(params: Mapping[str, Any] | None) -> str | None:
    """Mooncake's `transfer_id`."""
    transfer_id = params.get("transfer_id") if params else None
    return transfer_id if is_text(transfer_id, ID_LIMIT_BYTES) else None


def mooncake_remote_of(params: Mapping[str, Any] | None) -> Remote | None:
    """Where Mooncake's bootstrap server is and what is asked for there; None unless every field is there and of its kind.

    An address that is not `http://HOST:PORT` is kept whole, with port 0: asking there fails.
    """
    transfer_id = transfer_of(params)
    engine_id, told = (params.get(name) if params else None for name in ("remote_engine_id", "remote_bootstrap_addr"))
    if transfer_id is None or not is_text(engine_id, ID_LIMIT_BYTES) or not is_text(told, HOST_LIMIT_BYTES):
        return None
    host, _, port = told.removeprefix("http://").rpartition(":")
    if told.startswith("http://") and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
        return Remote(Peer(engine_id, host.strip("[]"), int(port)), transfer_id, ())
    return Remote(Peer(engine_id, told, 0), transfer_id, ())


def _peer(params: Mapping[str, Any]) -> Peer | None:
    engine_id, host, port = (params.get(name) for name in ("remote_engine_id", "remote_host", "remote_port"))
    tp_size = params.get("tp_size", 1)
    if not (is_text(engine_id, ID_LIMIT_BYTES) and is_text(host, HOST_LIMIT_BYTES)):
        return None
    if not (_is_int(port) and 0 < port < 65536 and _is_int(tp_size) and 1 <= tp_size <= MAX_RANKS):
        return None
    return Peer(engine_id, host, port, tp_size)


def _flat(told: object) -> tuple[int, ...] | None:
    """Block ids, told as one list for each cache group (one here) or, by older releases, as one list; None for other things."""
    if told is None:
        return ()
    if not isinstance(told, Sequence) or isinstance(told, str):
        return None
    if len(told) == 1 and isinstance(told[0], Sequence) and not isinstance(told[0], str):
        told = told[0]
    if len(told) > MAX_BLOCKS or not all(_is_int(block) and 0 < block <= MAX_BLOCK for block in told):
        return None
    return tuple(told)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def answer_of_prefill(
    config: KvTransferConfig, request_id: str, blocks: Sequence[int], tokens: int, cached_tokens: int
) -> dict[str, Any]:
    """What a prefill answers: where its blocks are. `remote_registration_generation` is always 0 here."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **_where(config, request_id, blocks, tokens, None),
        "remote_registration_generation": 0,
        "transfer_mode": "push" if config.pushes else "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }


def answer_of_decode(
    config: KvTransferConfig, request_id: str, blocks: Sequence[int], tokens: int, expiry_ns: int
) -> dict[str, Any]:
    """What a decode answers under `bidirectional_kv_xfer`, for the next turn of the conversation."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        **_where(config, request_id, blocks, tokens, expiry_ns / 1e9),
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def _where(
    config: KvTransferConfig, request_id: str, blocks: Sequence[int], tokens: int, expiry_s: float | None
) -> dict[str, Any]:
    return {
        "remote_block_ids": [list(blocks)],
        "remote_engine_id": config.engine_id,
        "remote_request_id": request_id,
        "remote_host": config.side_channel_host,
        "remote_port": config.side_channel_port,
        "tp_size": config.tp_size,
        "dcp_size": config.dcp_size,
        "pp_size": config.pp_size,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": expiry_s,
    }
