"""What NIXL agents of two servers tell each other besides the bytes: ours, in msgpack. Real engines do not look at the bytes.

A `Notice` travels as the notification of a write and says how to check what was written; a `Receipt` answers it.
"""

import msgspec

MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024
BLOCKS_LIMIT = 1 << 20


class MessageError(ValueError):
    """A message that is none of these."""


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """Writer → owner of the memory, with the write."""

    number: int
    """The writer's name for this write."""
    writer: bytes
    """The writer's NIXL metadata: where the receipt goes."""
    owner: str
    """Whose blocks these are: the content of a block follows from it."""
    blocks: tuple[int, ...]
    message: tuple[bytes, ...] = ()
    """What the engine attaches."""


class Receipt(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """Owner of the memory → writer."""

    number: int
    corrupt_blocks: int
    """Blocks whose bytes are not those that were sent."""


class MemoryMap(msgspec.Struct, frozen=True, array_like=True):
    """Where an agent's memory is: what a peer needs to read and write it."""

    agent: bytes
    """NIXL's metadata."""
    source_address: int
    sink_address: int
    block_bytes: int
    blocks: int


_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Notice | Receipt] = msgspec.msgpack.Decoder(Notice | Receipt)
_maps = msgspec.msgpack.Decoder(MemoryMap)


def encode(message: Notice | Receipt | MemoryMap) -> bytes:
    return _encoder.encode(message)


def decode(text: bytes) -> Notice | Receipt:
    """Raises MessageError."""
    if len(text) > MESSAGE_LIMIT_BYTES:
        raise MessageError(f"a notification of {len(text)} bytes: at most {MESSAGE_LIMIT_BYTES} are read")
    try:
        message = _messages.decode(text)
    except msgspec.MsgspecError as error:
        raise MessageError(f"a notification that is neither a notice nor a receipt: {error}") from None
    if isinstance(message, Notice) and len(message.blocks) > BLOCKS_LIMIT:
        raise MessageError(f"a notice of {len(message.blocks)} blocks: at most {BLOCKS_LIMIT} are read")
    return message


def decode_map(text: bytes) -> MemoryMap:
    """Raises MessageError."""
    try:
        return _maps.decode(text)
    except msgspec.MsgspecError as error:
        raise MessageError(f"a memory map that cannot be read: {error}") from None
