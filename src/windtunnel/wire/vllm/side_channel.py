"""What two vLLM engines with a KV connector say to each other, as bytes.

The *side channel* is vLLM's: a REQ socket asks `[get_meta_msg, pipeline rank, tensor-parallel rank]` in msgpack, and the ROUTER
answers two frames: a map of the compatibility hash and, encoded once more, the agent's metadata; and its clock in seconds, from
which vLLM makes the offset of the two clocks (vLLM 0.33, `nixl/base_worker.py`, `nixl/metadata.py`; reference §7.2). The hash
is read first, so that an engine of another release fails with that and not with a layout that cannot be read.

The *data plane* is NIXL's in vLLM (UCX, RDMA). Here it is a socket whose address stands in `agent_metadata`; its messages are
msgpack arrays of this module's own.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from windtunnel.core.vllm.connector.params import ID_LIMIT_BYTES, MAX_RANKS

GET_META = b"get_meta_msg"
_AGENT = b"windtunnel:"
MESSAGE_LIMIT_BYTES = 1024 * 1024
_PLACES_LIMIT = 1 << 20

Shape = TypeVar("Shape")


class SideChannelError(ValueError):
    """Bytes that are not what is due."""


class AgentMetadata(msgspec.Struct, frozen=True):
    """The agent behind a side channel. The two lists are empty where no real bytes are moved; otherwise they have one entry."""

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: int
    block_lens: list[int]
    kv_cache_layout: str
    block_size: int
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """Ours: vLLM's comes with `kv_transfer_params`."""


class Payload(msgspec.Struct, frozen=True):
    compatibility_hash: str
    agent_metadata_bytes: bytes


def encode_request(rank: int) -> bytes:
    return msgspec.msgpack.encode((GET_META, 0, rank))


def decode_request(message: bytes) -> tuple[int, int]:
    """The pipeline rank and the tensor-parallel rank that are asked for. Raises SideChannelError."""
    name, stage, rank = _decode(message, tuple[bytes, int, int], "[get_meta_msg, pipeline rank, rank]")
    if name != GET_META or stage < 0 or rank < 0:
        raise SideChannelError(f"the request is {name[:32]!r} for rank {stage}, {rank}: must be {GET_META!r} and ranks from 0")
    return stage, rank


def encode_clock(now_s: float) -> bytes:
    """The second frame of an answer."""
    return msgspec.msgpack.encode(now_s)


def encode_answer(compatibility_hash: str, metadata: AgentMetadata) -> bytes:
    return msgspec.msgpack.encode(Payload(compatibility_hash, msgspec.msgpack.encode(metadata)))


def decode_answer(message: bytes) -> tuple[str, AgentMetadata | None]:
    """The hash, and the metadata if they can be read. Raises SideChannelError for what has no hash."""
    payload = _decode(message, Payload, "a handshake payload")
    try:
        return payload.compatibility_hash, _decode(payload.agent_metadata_bytes, AgentMetadata, "agent metadata")
    except SideChannelError:
        return payload.compatibility_hash, None


def agent_bytes(endpoint: str, nixl: bytes = b"") -> bytes:
    """`nixl` is the metadata of a NIXL agent, where real bytes are moved."""
    return _AGENT + msgspec.msgpack.encode((endpoint, nixl))


def agent_of(metadata: AgentMetadata) -> tuple[str, bytes]:
    """ip:port of the data plane, and the metadata of a NIXL agent or b"".

    Raises SideChannelError for an agent that is not a simulator's.
    """
    if not metadata.agent_metadata.startswith(_AGENT):
        raise SideChannelError("the agent behind the side channel is not a simulator's")
    return _decode(metadata.agent_metadata[len(_AGENT) :], tuple[str, bytes], "an agent")


# The data plane


class Notification(NamedTuple):
    payload: bytes


class LandedQuestion(NamedTuple):
    """Of whoever has read: what of these blocks was not the request's any more?"""

    reply_to: str
    number: int
    request_id: str
    blocks: tuple[int, ...]


class LandedAnswer(NamedTuple):
    number: int
    foreign: tuple[int, ...]
    """Places in the blocks of the question."""


Message = Notification | LandedQuestion | LandedAnswer
_KINDS: dict[str, type[Any]] = {"notif": Notification, "landed?": LandedQuestion, "landed": LandedAnswer}
_NAMES: dict[type[Any], str] = {kind: name for name, kind in _KINDS.items()}


def encode_message(message: Message) -> bytes:
    return msgspec.msgpack.encode((_NAMES[type(message)], list(message)))


def decode_message(data: bytes) -> Message:
    """Raises SideChannelError."""
    name, fields = _decode(data, tuple[str, list[Any]], "[kind, fields]")
    kind = _KINDS.get(name)
    if kind is None:
        raise SideChannelError(f"the kind is {name[:32]!r}: must be one of {', '.join(_KINDS)}")
    try:
        message: Message = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise SideChannelError(f"{name}: {error}") from None
    if isinstance(message, LandedQuestion) and (len(message.request_id) > ID_LIMIT_BYTES or not _sane(message.blocks)):
        raise SideChannelError("landed?: an id or a list of blocks is too long, or a block is below 0")
    if isinstance(message, LandedAnswer) and not _sane(message.foreign):
        raise SideChannelError("landed: the list of places is too long, or a place is below 0")
    return message


def _sane(numbers: Sequence[int]) -> bool:
    return len(numbers) <= _PLACES_LIMIT and all(number >= 0 for number in numbers)


def _decode(data: bytes, shape: type[Shape], what: str) -> Shape:
    if len(data) > MESSAGE_LIMIT_BYTES:
        raise SideChannelError(f"{what} of {len(data)} bytes: at most {MESSAGE_LIMIT_BYTES} are read")
    try:
        return msgspec.msgpack.decode(data, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SideChannelError(f"not {what}: {error}") from None
