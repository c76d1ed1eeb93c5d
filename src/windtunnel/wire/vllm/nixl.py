"""What engines with NIXL connectors tell one another, as bytes (vLLM reference §7.2).

`<request id>:<consumers>` ends a transfer: a reader tells the prefill, or (push) the writer tells the decode. `HB:<ids>` keeps
holds; ids are separated by commas. `PUSH_REG:` is followed by a msgpack map: `request_id`, `decode_*` and `local_block_ids` are
vLLM's (0.33.0, `nixl/push_scheduler.py`, which adds the prefill's coordinates), `remote_request_id` is ours.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgpack

from windtunnel.core.vllm.connector.params import HOST_LIMIT_BYTES, ID_LIMIT_BYTES, MAX_BLOCK, MAX_BLOCKS, MAX_RANKS, is_text
from windtunnel.core.vllm.connector.seam import Consumed, Heartbeat, Notification, Peer, Pushed, Registration

HEARTBEAT = b"HB:"
REGISTRATION = b"PUSH_REG:"

BYTES_LIMIT = 16 * 1024 * 1024
IDS_LIMIT = 65536
_CONSUMERS_LIMIT = 65536


class NotificationError(ValueError):
    """Bytes that are no notification: says what is wrong."""


# Encoding


def encode(notification: Notification) -> bytes:
    return _ENCODERS[type(notification)](notification)


def _consumed(told: Consumed) -> bytes:
    return f"{told.request_id}:{told.consumers}".encode()


def _pushed(told: Pushed) -> bytes:
    return f"{told.request_id}:1".encode()


def _heartbeat(told: Heartbeat) -> bytes:
    return HEARTBEAT + ",".join(told.request_ids).encode()


def _registration(told: Registration) -> bytes:
    decode = told.decode
    members = {
        "request_id": told.request_id,
        "remote_request_id": told.remote_request_id,
        "decode_engine_id": decode.engine_id,
        "decode_host": decode.host,
        "decode_port": decode.port,
        "decode_tp_size": decode.tp_size,
        "local_block_ids": [list(told.blocks)],
    }
    packed: bytes = msgpack.packb(members)
    return REGISTRATION + packed


_ENCODERS: Mapping[type, Callable[[Any], bytes]] = MappingProxyType(
    {Consumed: _consumed, Pushed: _pushed, Heartbeat: _heartbeat, Registration: _registration}
)


# Decoding


def decode(data: bytes) -> Notification:
    """Never a `Pushed`: on the wire that is a `Consumed` with the decode's id. Raises NotificationError."""
    if len(data) > BYTES_LIMIT:
        raise NotificationError(f"a notification has {len(data)} bytes: at most {BYTES_LIMIT} are read")
    if data.startswith(REGISTRATION):
        return _read_registration(data[len(REGISTRATION) :])
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise NotificationError("a notification is not UTF-8") from None
    if data.startswith(HEARTBEAT):
        return Heartbeat(_ids(text[len(HEARTBEAT) :]))
    return _read_consumed(text)


def _ids(text: str) -> tuple[str, ...]:
    ids = tuple(one for one in text.split(",") if one)
    if len(ids) > IDS_LIMIT:
        raise NotificationError(f"a heartbeat names {len(ids)} requests: at most {IDS_LIMIT} are read")
    if not all(is_text(one, ID_LIMIT_BYTES) for one in ids):
        raise NotificationError(f"a heartbeat names a request whose id has over {ID_LIMIT_BYTES} bytes")
    return ids


def _read_consumed(text: str) -> Consumed:
    request_id, separator, consumers = text.rpartition(":")
    if not separator or not request_id:
        raise NotificationError(f"{text[:80]!r} is no notification: write <request id>:<consumers>")
    if not is_text(request_id, ID_LIMIT_BYTES):
        raise NotificationError(f"the id {request_id[:80]!r}… has over {ID_LIMIT_BYTES} bytes")
    if not (consumers.isascii() and consumers.isdigit() and len(consumers) < 6 and 1 <= int(consumers) <= _CONSUMERS_LIMIT):
        raise NotificationError(f"the consumers of {request_id[:80]!r} are {consumers[:20]!r}: must be a number from 1 on")
    return Consumed(request_id, int(consumers))


def _read_registration(payload: bytes) -> Registration:
    try:
        told = msgpack.unpackb(payload, max_map_len=64, max_array_len=MAX_BLOCKS)
    except (ValueError, msgpack.UnpackException) as error:
        raise NotificationError(f"a registration is not msgpack: {error}") from None
    if not isinstance(told, dict):
        raise NotificationError("a registration is not a map")
    peer = Peer(
        _text(told, "decode_engine_id"),
        _text(told, "decode_host", HOST_LIMIT_BYTES),
        _number(told, "decode_port", 1, 65535),
        _number(told, "decode_tp_size", 1, MAX_RANKS),
    )
    remote = told.get("remote_request_id")
    if remote is not None:
        _text(told, "remote_request_id")
    return Registration(_text(told, "request_id"), remote, peer, _blocks(told.get("local_block_ids")))


def _text(told: Mapping[Any, Any], name: str, limit_bytes: int = ID_LIMIT_BYTES) -> str:
    value = told.get(name)
    if not is_text(value, limit_bytes):
        raise NotificationError(f"{name} of a registration is {value!r:.80}: must be text of 1 to {limit_bytes} bytes")
    return value


def _number(told: Mapping[Any, Any], name: str, least: int, most: int) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise NotificationError(f"{name} of a registration is {value!r:.80}: must be {least} to {most}")
    return value


def _blocks(told: object) -> tuple[int, ...]:
    """One list for each cache group (there is one), or a bare list."""
    blocks = told[0] if isinstance(told, list) and len(told) == 1 and isinstance(told[0], list) else told
    if not isinstance(blocks, list) or not all(_is_block(block) for block in blocks):
        raise NotificationError(f"local_block_ids of a registration must be one list of block ids from 0 to {MAX_BLOCK}")
    return tuple(blocks)


def _is_block(told: object) -> bool:
    return isinstance(told, int) and not isinstance(told, bool) and 0 <= told <= MAX_BLOCK
