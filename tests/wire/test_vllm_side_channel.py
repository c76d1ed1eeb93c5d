"""The bytes between two vLLM engines with a KV connector (vLLM reference §7.2)."""

import msgspec
import pytest

from windtunnel.core.vllm.connector.params import MAX_RANKS
from windtunnel.wire.vllm.side_channel import (
    AgentMetadata,
    LandedAnswer,
    LandedQuestion,
    Message,
    Notification,
    SideChannelError,
    agent_bytes,
    agent_of,
    decode_answer,
    decode_message,
    decode_request,
    encode_answer,
    encode_message,
    encode_request,
)

METADATA = AgentMetadata("e", agent_bytes("127.0.0.1:7"), [], 0, 100, [], "HND", 16)


def test_a_request_is_what_vllm_sends() -> None:
    """A pipeline rank and a tensor-parallel rank (vLLM 0.33, `_nixl_handshake`); its listener breaks on anything else."""
    assert msgspec.msgpack.decode(encode_request(3)) == [b"get_meta_msg", 0, 3]
    assert decode_request(msgspec.msgpack.encode((b"get_meta_msg", 0, 1))) == (0, 1)


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"\xff",
        *map(
            msgspec.msgpack.encode, ([b"other", 0, 1], [b"get_meta_msg", 1], [b"get_meta_msg", 0, -1], [b"get_meta_msg", -1, 0])
        ),
    ],
)
def test_other_requests_are_refused(request_: bytes) -> None:
    with pytest.raises(SideChannelError):
        decode_request(request_)


def test_an_answer_has_vllms_members_and_comes_back() -> None:
    told = msgspec.msgpack.decode(encode_answer("hash", METADATA))
    assert set(told) == {"compatibility_hash", "agent_metadata_bytes"}
    assert msgspec.msgpack.decode(told["agent_metadata_bytes"])["engine_id"] == "e"
    assert decode_answer(encode_answer("hash", METADATA)) == ("hash", METADATA)


@pytest.mark.parametrize("tp_size", [0, -1, MAX_RANKS + 1])
def test_ranks_that_nobody_has_cannot_be_read(tp_size: int) -> None:
    """The engine divides by it."""
    told = msgspec.structs.replace(METADATA, tp_size=tp_size)
    assert decode_answer(encode_answer("hash", told)) == ("hash", None)
    assert agent_of(METADATA) == ("127.0.0.1:7", b"")


def test_the_hash_can_be_read_where_the_metadata_cannot() -> None:
    message = msgspec.msgpack.encode({"compatibility_hash": "other", "agent_metadata_bytes": b"\xc1"})
    assert decode_answer(message) == ("other", None)
    with pytest.raises(SideChannelError):
        decode_answer(msgspec.msgpack.encode({"agent_metadata_bytes": b""}))


def test_a_real_agent_is_named() -> None:
    with pytest.raises(SideChannelError, match="simulator's"):
        agent_of(msgspec.structs.replace(METADATA, agent_metadata=b"\x00ucx"))


@pytest.mark.parametrize("message", [Notification(b"HB:a"), LandedQuestion("h:1", 4, "r", (1, 2)), LandedAnswer(4, (0,))])
def test_messages_come_back(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93",
        msgspec.msgpack.encode(["what", []]),
        msgspec.msgpack.encode(["landed", [1]]),
        msgspec.msgpack.encode(["landed?", ["h:1", 1, "r", [-1]]]),
        msgspec.msgpack.encode(["landed?", ["h:1", 1, "r" * 5000, []]]),
        msgspec.msgpack.encode(["notif", [b"x" * (1 << 21)]]),
    ],
)
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(SideChannelError):
        decode_message(data)
