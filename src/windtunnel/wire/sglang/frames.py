"""What prefill and decode ranks send each other over ZMQ: multipart messages to values and back (SGLang reference §4.1).

Decode → prefill: *registration* (guard, the literal `None`, address, memory layout), *metadata* (guard, room, address, pages),
`ABORT`. Prefill → decode: `KV_STATUS`, `ABORT_ACK`. Numbers are ASCII decimals, page lists int32 arrays. Two things are ours:
metadata ends with the stamp of the allocation, and `SIM_KV` is the data plane, a remote write that carries what NIXL would
attach to it.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from windtunnel.core.transfer.frames import Abort, AbortAck, Aux, Frame, KvChunk, KvStatus, Metadata
from windtunnel.core.transfer.status import KVPoll

GUARD = b"NixlMsgGuard"
NO_ROOM = b"None"
ABORT = b"ABORT"
KV_STATUS = b"KV_STATUS"
ABORT_ACK = b"ABORT_ACK"
SIM_KV = b"SIM_KV"

PARTS_LIMIT = 32
PART_LIMIT_BYTES = 16 * 1024 * 1024
_DIGITS_LIMIT = 20
_REASON_LIMIT = 4096
_MEMORY_LIMIT_BYTES = 65536


class FrameError(ValueError):
    """A message that is none of these. The text names the part."""


class Registration(NamedTuple):
    """Decode → prefill, once for each pair of ranks: where the decode's memory is."""

    peer: str
    """ip:port of the decode rank's socket."""
    agent_name: str
    gpu_id: int = 0
    attn_tp_size: int = 1
    engine_rank: int = 0
    kv_item_len: int = 0
    slots: int = 0
    memory: bytes = b""
    """Where real bytes go (`wire.real_bytes.MemoryMap`), in the place of NIXL's metadata; empty without real bytes."""


Message = Frame | Registration


# Encoding


def encode(message: Message, agent_name: str = "") -> list[bytes]:
    """The parts of one message. `agent_name` goes into metadata."""
    if isinstance(message, Metadata):
        return _metadata_parts(message, agent_name)
    return _ENCODERS[type(message)](message)


def _number(value: int) -> bytes:
    return b"%d" % value


def _address(peer: str) -> list[bytes]:
    host, _, port = peer.rpartition(":")
    return [host.encode(), port.encode()]


def _metadata_parts(frame: Metadata, agent_name: str) -> list[bytes]:
    return [
        GUARD,
        _number(frame.room),
        *_address(frame.peer),
        agent_name.encode(),
        array("i", frame.pages).tobytes(),
        _number(frame.aux_index),
        _number(frame.required_dst_info_num),
        b"",
        _number(frame.prefix_tokens),
        _number(frame.dummy),
        _number(frame.stamp),
    ]


def _registration_parts(message: Registration) -> list[bytes]:
    """As NIXL's, with nothing in the places that describe the KV's layout (base addresses, dims, staging …)."""
    head = [GUARD, NO_ROOM, *_address(message.peer), message.agent_name.encode(), message.memory, b"", b"", b""]
    sizes = [message.gpu_id, message.attn_tp_size, message.engine_rank, message.kv_item_len]
    return [*head, *map(_number, sizes), b"", b"", b"0", b"0", _number(message.slots), b"", b""]


def _abort_parts(frame: Abort) -> list[bytes]:
    generation = [] if frame.generation is None else [_number(frame.generation)]
    return [ABORT, _number(frame.room), *_address(frame.peer), *generation]


def _status_parts(frame: KvStatus) -> list[bytes]:
    reason = frame.reason.encode()[:_REASON_LIMIT]
    return [KV_STATUS, _number(frame.room), _number(frame.status), _number(frame.rank), reason]


def _ack_parts(frame: AbortAck) -> list[bytes]:
    return [ABORT_ACK, _number(frame.room), _number(frame.rank), _number(frame.generation)]


def _chunk_parts(frame: KvChunk) -> list[bytes]:
    aux = b"" if frame.aux is None else b"%d,%d,%d" % frame.aux
    pages = array("i", frame.pages).tobytes()
    return [SIM_KV, frame.notification.encode(), pages, _number(frame.stamp), _number(frame.aux_index), aux]


_ENCODERS: Mapping[type, Callable[..., list[bytes]]] = MappingProxyType(
    {
        Registration: _registration_parts,
        Abort: _abort_parts,
        KvStatus: _status_parts,
        AbortAck: _ack_parts,
        KvChunk: _chunk_parts,
    }
)


# Decoding


def decode(parts: Sequence[bytes]) -> Message:
    """Raises FrameError."""
    if not 0 < len(parts) <= PARTS_LIMIT:
        raise FrameError(f"a message of {len(parts)} parts: 1 to {PARTS_LIMIT} are allowed")
    tag = bytes(parts[0])
    if tag == GUARD:
        tag = NO_ROOM if len(parts) > 1 and parts[1] == NO_ROOM else GUARD
    known = _DECODERS.get(tag)
    if known is None:
        raise FrameError(f"a message with the tag {tag[:32]!r}: known are {', '.join(one.decode() for one in _DECODERS)}")
    least, decoder = known
    if len(parts) < least:
        raise FrameError(f"a {tag.decode()} message of {len(parts)} parts: at least {least} are due")
    return decoder(parts)


def _integer(part: bytes, name: str) -> int:
    text = bytes(part)
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > _DIGITS_LIMIT:
        raise FrameError(f"{name} is {text[:32]!r}: write a decimal number")
    return int(text)


def _peer(host: bytes, port: bytes) -> str:
    number = _integer(port, "port")
    if not host or not 0 < number < 65536:
        raise FrameError(f"address is {bytes(host)!r}:{number}: write an ip and a port from 1 to 65535")
    return f"{_text(host)}:{number}"


def _text(part: bytes) -> str:
    return bytes(part).decode("utf-8", "replace")


def _pages(part: bytes) -> tuple[int, ...]:
    pages = array("i")
    if len(part) % pages.itemsize or len(part) > PART_LIMIT_BYTES:
        raise FrameError(f"pages are {len(part)} bytes: an int32 array of at most {PART_LIMIT_BYTES} bytes is due")
    pages.frombytes(part)
    if pages and min(pages) < 0:
        raise FrameError(f"pages contain {min(pages)}: page numbers start at 0")
    return tuple(pages)


def _metadata(parts: Sequence[bytes]) -> Metadata:
    return Metadata(
        room=_integer(parts[1], "room"),
        peer=_peer(parts[2], parts[3]),
        pages=_pages(parts[5]),
        stamp=_integer(parts[11], "stamp") if len(parts) > 11 else 0,
        aux_index=_integer(parts[6], "aux index"),
        required_dst_info_num=_integer(parts[7], "required_dst_info_num"),
        prefix_tokens=_integer(parts[9], "prefix length") if len(parts) > 9 else 0,
        dummy=len(parts) > 10 and parts[10] == b"1",
    )


def _registration(parts: Sequence[bytes]) -> Registration:
    names = ("gpu id", "attn_tp_size", "engine rank", "kv item length")
    gpu, tp_size, rank, length = (_integer(part, name) for part, name in zip(parts[9:13], names, strict=True))
    slots = _integer(parts[17], "slot count") if len(parts) > 17 else 0
    if len(parts[5]) > _MEMORY_LIMIT_BYTES:
        raise FrameError(f"a memory map of {len(parts[5])} bytes: at most {_MEMORY_LIMIT_BYTES} are read")
    peer, memory = _peer(parts[2], parts[3]), bytes(parts[5])
    return Registration(peer, _text(parts[4]), gpu, tp_size, rank, length, slots, memory)


def _abort(parts: Sequence[bytes]) -> Abort:
    generation = _integer(parts[4], "generation") if len(parts) > 4 else None
    return Abort(_integer(parts[1], "room"), _peer(parts[2], parts[3]), generation)


def _status(parts: Sequence[bytes]) -> KvStatus:
    number = _integer(parts[2], "status")
    if number not in set(KVPoll):
        raise FrameError(f"status is {number}: one of {', '.join(f'{one.value} {one.name}' for one in KVPoll)} is due")
    reason = _text(parts[4])[:_REASON_LIMIT] if len(parts) > 4 else ""
    return KvStatus(_integer(parts[1], "room"), KVPoll(number), _integer(parts[3], "rank"), reason)


def _ack(parts: Sequence[bytes]) -> AbortAck:
    return AbortAck(*(_integer(part, name) for part, name in zip(parts[1:4], ("room", "rank", "generation"), strict=True)))


def _chunk(parts: Sequence[bytes]) -> KvChunk:
    fields = bytes(parts[1]).split(b"_")
    if len(fields) != 5 or fields[1] != b"kv":
        raise FrameError(f"notification is {bytes(parts[1])[:64]!r}: ROOM_kv_CHUNK_LAST_RANK is due")
    room, chunk, last, rank = (_integer(fields[at], "notification") for at in (0, 2, 3, 4))
    stamp, aux_index = _integer(parts[3], "stamp"), _integer(parts[4], "aux index")
    return KvChunk(room, chunk, bool(last), rank, _pages(parts[2]), stamp, aux_index, _aux(parts[5]))


def _aux(part: bytes) -> Aux | None:
    if not part:
        return None
    fields = bytes(part).split(b",")
    if len(fields) != 3:
        raise FrameError(f"aux is {bytes(part)[:64]!r}: ROOM,TOKEN,CACHED is due")
    return Aux(*(_integer(field, "aux") for field in fields))


_DECODERS: Mapping[bytes, tuple[int, Callable[[Sequence[bytes]], Message]]] = MappingProxyType(
    {
        GUARD: (8, _metadata),
        NO_ROOM: (13, _registration),
        ABORT: (4, _abort),
        KV_STATUS: (4, _status),
        ABORT_ACK: (4, _ack),
        SIM_KV: (6, _chunk),
    }
)
"""Tag → (least number of parts, decoder)."""
