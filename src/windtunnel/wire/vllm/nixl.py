"""The notifications of vLLM's NIXL connectors as bytes (vLLM reference §7.2).

`<request id>:<consumers>` when a reader has what it needs, `HB:<id>,<id>` for requests that are still wanted, and in push mode
`PUSH_REG:<msgpack>` from the decode and `PUSH_DONE:<request id>` from the prefill. The payloads behind `PUSH_REG:` and
`PUSH_DONE:` are this module's own: the reference does not have them.
"""

import msgspec

from windtunnel.core.vllm.connector.seam import Consumed, Heartbeat, Notification, Peer, Pushed, Registration

_HEARTBEAT = b"HB:"
_REGISTRATION = b"PUSH_REG:"
_PUSHED = b"PUSH_DONE:"
_COMMA = ","
SIZE_LIMIT_BYTES = 1024 * 1024
CONSUMERS_LIMIT = 1024


def encode(notification: Notification) -> bytes:
    if isinstance(notification, Consumed):
        return f"{notification.request_id}:{notification.consumers}".encode()
    if isinstance(notification, Heartbeat):
        return _HEARTBEAT + _COMMA.join(notification.request_ids).encode()
    if isinstance(notification, Registration):
        return _REGISTRATION + msgspec.msgpack.encode(notification)
    return _PUSHED + notification.request_id.encode()


def decode(data: bytes) -> Notification:
    """Raises ValueError for what is none."""
    if len(data) > SIZE_LIMIT_BYTES:
        raise ValueError(f"a notification of {len(data)} bytes: at most {SIZE_LIMIT_BYTES} are read")
    if data.startswith(_HEARTBEAT):
        ids = data[len(_HEARTBEAT) :].decode().split(_COMMA)
        return Heartbeat(tuple(one for one in ids if one))
    if data.startswith(_REGISTRATION):
        return _registration(data[len(_REGISTRATION) :])
    if data.startswith(_PUSHED):
        return Pushed(data[len(_PUSHED) :].decode())
    return _consumed(data)


def _consumed(data: bytes) -> Consumed:
    """The id may have colons of its own."""
    request_id, colon, consumers = data.decode().rpartition(":")
    if not colon or not request_id or not consumers.isdecimal() or not 0 < int(consumers) <= CONSUMERS_LIMIT:
        raise ValueError(f"{data[:80]!r} is no notification: must be <id>:<consumers>, HB:<ids>, PUSH_REG: or PUSH_DONE:")
    return Consumed(request_id, int(consumers))


def _registration(payload: bytes) -> Registration:
    try:
        told = msgspec.msgpack.decode(payload, type=tuple[str, str | None, tuple[str, str, int, int], tuple[int, ...]])
    except msgspec.DecodeError as error:
        raise ValueError(f"PUSH_REG: {error}") from None
    request_id, remote_request_id, peer, blocks = told
    if any(block < 0 for block in blocks) or not 0 < peer[2] < 65536 or peer[3] < 1:
        raise ValueError("PUSH_REG: a block, the port or the size of the decode is out of range")
    return Registration(request_id, remote_request_id, Peer(*peer), blocks)
