"""`kv_transfer_params` of strangers: whatever is not of its kind counts as missing."""

from typing import Any

import pytest
from tests.core.vllm.kv_rig import Pair

from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.params import HOST_LIMIT_BYTES, ID_LIMIT_BYTES, MAX_BLOCKS, remote_of
from windtunnel.core.vllm.connector.peers import IDS_A_BEAT, Heart
from windtunnel.wire.vllm.nixl import encode
from windtunnel.wire.vllm.side_channel import MESSAGE_LIMIT_BYTES, Notification, encode_message

SOUND: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "e" * ID_LIMIT_BYTES,
    "remote_request_id": "r" * ID_LIMIT_BYTES,
    "remote_host": "h" * HOST_LIMIT_BYTES,
    "remote_port": 5600,
    "remote_block_ids": [[1, 2]],
}
NONSENSE: list[tuple[str, Any]] = [
    *((name, value) for name in ("remote_engine_id", "remote_request_id", "remote_host") for value in ("\ud800", "", 7, None)),
    ("remote_engine_id", "e" * (ID_LIMIT_BYTES + 1)),
    ("remote_request_id", "ü" * (ID_LIMIT_BYTES // 2 + 1)),
    ("remote_host", "h" * (HOST_LIMIT_BYTES + 1)),
    ("remote_block_ids", [[1] * (MAX_BLOCKS + 1)]),
    ("remote_block_ids", [[1 << 31]]),
]


def test_the_longest_are_read() -> None:
    assert remote_of(SOUND) is not None


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=str)
def test_nonsense_counts_as_missing(name: str, value: Any) -> None:
    assert remote_of(SOUND | {name: value}) is None


def test_the_warning_is_short_and_printable() -> None:
    pair = Pair()
    pair.decode("a", SOUND | {"remote_request_id": "\ud800", "more\n": "x" * 100_000})
    (warning,) = pair.d.engine.take_warnings()
    assert warning.startswith("Got invalid KVTransferParams: {") and len(warning) < 400 and warning.isprintable()
    pair.run(lambda: "a-d" in pair.d.finish)
    pair.rest()


def test_heartbeats_of_the_longest_ids_fit_into_messages_of_the_data_plane() -> None:
    config = KvTransferConfig(engine_id="mine")
    heart, wanted = Heart(config.beat_ns), [f"{number:0{ID_LIMIT_BYTES}}" for number in range(IDS_A_BEAT * 2 + 1)]
    for number, request_id in enumerate(wanted):
        remote = remote_of(SOUND | {"remote_request_id": request_id})
        assert remote is not None
        heart.start(str(number), remote, 0)
    beats = [notice.notification for notice in heart.beat(0)]
    assert all(len(encode_message(Notification(encode(beat)))) <= MESSAGE_LIMIT_BYTES for beat in beats)
    assert [one for beat in beats for one in beat.request_ids] == wanted  # type: ignore[union-attr]
