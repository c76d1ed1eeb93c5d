"""P/D messages: every value survives the wire, and nothing malformed gets through (SGLang reference §4.1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core.transfer.frames import Abort, AbortAck, Aux, KvChunk, KvStatus, Metadata
from windtunnel.core.transfer.status import KVPoll
from windtunnel.wire.sglang.frames import ABORT, GUARD, SIM_KV, FrameError, Registration, decode, encode

_ROOM = st.integers(0, (1 << 63) - 1)
_PORT = st.integers(1, 65535)
_PEER = st.builds("10.0.0.{}:{}".format, st.integers(1, 254), _PORT)
_PAGES = st.lists(st.integers(0, (1 << 31) - 1), max_size=50).map(tuple)
_SMALL = st.integers(0, 1 << 40)
_AUX = st.none() | st.builds(Aux, _ROOM, st.integers(-1, 1 << 31), _SMALL)
_MESSAGES = st.one_of(
    st.builds(Metadata, _ROOM, _PEER, _PAGES, _SMALL, _SMALL, st.integers(1, 64), _SMALL, st.booleans()),
    st.builds(Abort, _ROOM, _PEER, st.none() | _SMALL),
    st.builds(KvStatus, _ROOM, st.sampled_from(KVPoll), _SMALL, st.text(max_size=200)),
    st.builds(AbortAck, _ROOM, _SMALL, _SMALL),
    st.builds(KvChunk, _ROOM, _SMALL, st.booleans(), _SMALL, _PAGES, _SMALL, _SMALL, _AUX),
    st.builds(Registration, _PEER, st.text("abcdef0123456789", max_size=32), *[_SMALL] * 5),
)


@given(_MESSAGES)
def test_every_message_comes_back_as_it_was(message: object) -> None:
    assert decode(encode(message, "agent")) == message  # type: ignore[arg-type]


def test_the_layout_of_the_frames_that_sglang_has() -> None:
    metadata = encode(Metadata(7, "10.0.0.2:7001", (3, 4), 9, 5, 2, 16), "agent")
    assert metadata[:5] == [GUARD, b"7", b"10.0.0.2", b"7001", b"agent"]
    assert metadata[5] == b"\3\0\0\0\4\0\0\0"
    assert metadata[6:8] == [b"5", b"2"]
    assert encode(Registration("10.0.0.2:7001", "agent"))[:4] == [GUARD, b"None", b"10.0.0.2", b"7001"]
    assert encode(Abort(7, "10.0.0.2:7001")) == [ABORT, b"7", b"10.0.0.2", b"7001"]
    assert encode(Abort(7, "10.0.0.2:7001", 3))[4:] == [b"3"]
    assert encode(KvStatus(7, KVPoll.FAILED, 1, "why")) == [b"KV_STATUS", b"7", b"0", b"1", b"why"]
    assert encode(AbortAck(7, 1, 3)) == [b"ABORT_ACK", b"7", b"1", b"3"]
    assert encode(KvChunk(7, 2, True, 1, (), 0, 0))[1] == b"7_kv_2_1_1"


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ([], "0 parts"),
        ([b"x"] * 33, "33 parts"),
        ([b"HELLO", b"1"], "tag"),
        ([GUARD, b"7"], "2 parts"),
        ([ABORT, b"seven", b"10.0.0.2", b"7001"], "room"),
        ([ABORT, b"9" * 21, b"10.0.0.2", b"7001"], "room"),
        ([ABORT, b"7", b"10.0.0.2", b"70000"], "address"),
        ([b"KV_STATUS", b"7", b"9", b"1"], "status"),
        ([GUARD, b"7", b"h", b"1", b"a", b"\0\0\0", b"0", b"1"], "int32"),
        ([GUARD, b"7", b"h", b"1", b"a", b"\xff\xff\xff\xff", b"0", b"1"], "page numbers"),
        ([SIM_KV, b"7_aux", b"", b"0", b"0", b""], "notification"),
        ([SIM_KV, b"7_kv_0_1_0", b"", b"0", b"0", b"1,2"], "aux"),
    ],
)
def test_a_malformed_message_is_refused_by_name(parts: list[bytes], what: str) -> None:
    with pytest.raises(FrameError, match=what):
        decode(parts)


@given(st.lists(st.binary(max_size=40), max_size=12), st.sampled_from([GUARD, ABORT, SIM_KV, b"KV_STATUS", b"ABORT_ACK"]))
def test_any_bytes_give_a_message_or_a_frame_error(parts: list[bytes], tag: bytes) -> None:
    try:
        decode([tag, *parts])
    except FrameError:
        return
