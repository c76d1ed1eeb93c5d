"""Notifications of vLLM's NIXL connectors (vLLM reference §7.2)."""

import pytest

from windtunnel.core.vllm.connector.seam import Consumed, Heartbeat, Notification, Peer, Pushed, Registration
from windtunnel.wire.vllm.nixl import decode, encode

REGISTRATION = Registration("d-1", "p-1", Peer("e", "localhost", 5600, 2), (4, 5))


@pytest.mark.parametrize(
    ("notification", "data"),
    [
        (Consumed("cmpl-a:b-0", 2), b"cmpl-a:b-0:2"),
        (Heartbeat(("a", "b")), b"HB:a,b"),
        (Heartbeat(()), b"HB:"),
        (Pushed("d"), b"PUSH_DONE:d"),
        (REGISTRATION, None),
        (REGISTRATION._replace(remote_request_id=None), None),
    ],
)
def test_they_come_back(notification: Notification, data: bytes | None) -> None:
    assert encode(notification) == data or data is None
    assert decode(encode(notification)) == notification


def test_a_registration_says_what_it_is() -> None:
    assert encode(REGISTRATION).startswith(b"PUSH_REG:")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a",
        b":1",
        b"a:",
        b"a:x",
        b"a:0",
        b"a:99999",
        b"\xff:1",
        b"PUSH_REG:",
        b"PUSH_REG:\x91\x01",
        b"x" * (1 << 21),
        encode(REGISTRATION._replace(blocks=(-1,))),
        encode(REGISTRATION._replace(decode=Peer("e", "h", 70000))),
    ],
)
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"notification|PUSH_REG|codec"):
        decode(data)
