"""What NIXL engines tell one another, as bytes, and `--kv-transfer-config`."""

import contextlib
import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core.units import S
from windtunnel.core.vllm.connector.seam import Consumed, Heartbeat, Notification, Peer, Pushed, Registration
from windtunnel.wire.vllm.kv_transfer import NOT_MODELLED, parse
from windtunnel.wire.vllm.nixl import NotificationError, decode, encode

ids = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1, max_size=60)
peers = st.builds(Peer, ids, ids, st.integers(1, 65535), st.integers(1, 1024))
notifications = (
    st.builds(Consumed, ids.filter(lambda one: not one.startswith(("HB:", "PUSH_REG:"))), st.integers(1, 65536))
    | st.builds(Heartbeat, st.lists(ids).map(tuple))
    | st.builds(Registration, ids, st.none() | ids, peers, st.lists(st.integers(0, 1 << 30)).map(tuple))
)


@given(notifications)
def test_round_trip(notification: Notification) -> None:
    assert decode(encode(notification)) == notification


def test_the_forms() -> None:
    assert encode(Consumed("cmpl-1-0-abc", 2)) == b"cmpl-1-0-abc:2"
    assert encode(Heartbeat(("a", "b"))) == b"HB:a,b"
    assert encode(Pushed("x")) == b"x:1" and decode(b"x:1") == Consumed("x", 1)
    assert decode(b"id:with:colons:3") == Consumed("id:with:colons", 3)
    assert encode(Registration("d", None, Peer("e", "h", 1), (3, 4))).startswith(b"PUSH_REG:\x87")


def registration(**changes: Any) -> bytes:
    told = {"request_id": "d", "decode_engine_id": "e", "decode_host": "h", "decode_port": 1, "decode_tp_size": 1}
    packed: bytes = msgpack.packb({**told, "local_block_ids": [[1]], **changes})
    return b"PUSH_REG:" + packed


def test_a_flat_list_of_blocks_is_read() -> None:
    assert decode(registration(local_block_ids=[5, 6])) == Registration("d", None, Peer("e", "h", 1), (5, 6))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is no notification"),
        (b":1", "is no notification"),
        (b"id", "is no notification"),
        (b"id:", "consumers"),
        (b"id:0", "consumers"),
        (b"id:-1", "consumers"),
        (b"id:999999", "consumers"),
        ("id:²".encode(), "consumers"),
        (b"\xff:1", "UTF-8"),
        (b"PUSH_REG:", "msgpack"),
        (b"PUSH_REG:\xc1", "msgpack"),
        (b"PUSH_REG:\x01", "not a map"),
        (registration(request_id=""), "request_id"),
        (registration(decode_port=0), "decode_port"),
        (registration(decode_tp_size=True), "decode_tp_size"),
        (registration(local_block_ids=[[1], [2]]), "local_block_ids"),
        (registration(local_block_ids="x"), "local_block_ids"),
        (registration(remote_request_id=7), "remote_request_id"),
        (registration(remote_request_id="x" * 1025), "remote_request_id"),
        (registration(request_id="ü" * 513), "request_id"),
        (registration(decode_host="h" * 256), "decode_host"),
        (registration(local_block_ids=[1 << 31]), "local_block_ids"),
        (registration(local_block_ids=[-1]), "local_block_ids"),
        (b"x" * 1025 + b":1", "has over 1024 bytes"),
        (b"HB:a," + b"x" * 1025, "has over 1024 bytes"),
        (b"HB:" + b"a," * 70_000, "heartbeat"),
        (b"x" * (16 * 1024 * 1024 + 1), "bytes"),
    ],
)
def test_what_is_no_notification_says_why(data: bytes, what: str) -> None:
    with pytest.raises(NotificationError, match=what):
        decode(data)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"PUSH_REG:" + tail))
def test_any_bytes_decode_or_say_why(data: bytes) -> None:
    with contextlib.suppress(NotificationError):
        decode(data)


def told(**changes: Any) -> str:
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", **changes})


def test_a_configuration() -> None:
    extra = {"kv_lease_duration": 12.5, "kv_recompute_threshold": 0, "backends": ["UCX"], "decoder_kv_blocks_ttl": 60}
    parsed = parse(
        told(
            kv_role="kv_producer", kv_load_failure_policy="recompute", kv_buffer_device="cuda", kv_connector_extra_config=extra
        ),
        engine_id="made-up",
        side_channel_port=5601,
    )
    config = parsed.config
    assert (config.connector, config.role, config.engine_id) == ("NixlConnector", "kv_producer", "made-up")
    assert (config.lease_ns, config.kv_recompute_threshold, config.load_failure_policy) == (12_500_000_000, 0, "recompute")
    assert config.decoder_kv_blocks_ttl_ns == 60 * S and config.side_channel_port == 5601
    assert parsed.ignored == ("kv_buffer_device", "backends")


def test_the_defaults_are_those_of_vllm() -> None:
    config = parse(told(), engine_id="e").config
    assert (config.lease_ns, config.beat_ns, config.extension_ns) == (30 * S, 5 * S, 20 * S)
    assert (config.load_failure_policy, config.kv_recompute_threshold, config.decoder_kv_blocks_ttl_ns) == ("fail", 64, 480 * S)
    assert parse(told(engine_id="named"), engine_id="e").config.engine_id == "named"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "kv-transfer-config is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"kv_role": "kv_both"}', "kv_connector is missing"),
        ('{"kv_connector": "NixlConnector"}', "kv_role is missing"),
        (told(kv_connector="Nixl"), "kv_connector is 'Nixl': must be one of NixlConnector"),
        (told(kv_connector=NOT_MODELLED[0]), "is not modelled: use one of"),
        (told(kv_role="prefill"), "kv_role is 'prefill': must be one of kv_producer, kv_consumer, kv_both"),
        (told(kv_roles="x"), "kv_roles is not a field of kv-transfer-config"),
        (told(engine_id=5), "engine_id"),
        (told(kv_load_failure_policy="retry"), "kv_load_failure_policy"),
        (told(kv_connector_extra_config=[]), "kv_connector_extra_config must be"),
        (told(kv_connector_extra_config={"lease": 1}), "lease is not a field of kv_connector_extra_config"),
        (told(kv_connector_extra_config={"kv_lease_duration": 0}), "kv_lease_duration is 0: must be a number of seconds"),
        (told(kv_connector_extra_config={"kv_lease_duration": True}), "kv_lease_duration"),
        (told(kv_connector_extra_config={"kv_lease_duration": float("nan")}), "kv_lease_duration"),
        (told(kv_connector_extra_config={"kv_recompute_threshold": -1}), "kv_recompute_threshold"),
        (told(kv_connector_extra_config={"bidirectional_kv_xfer": 1}), "bidirectional_kv_xfer"),
        (
            told(kv_connector="NixlPushConnector", kv_connector_extra_config={"bidirectional_kv_xfer": True}),
            "bidirectional_kv_xfer is not supported",
        ),
    ],
)
def test_a_bad_configuration_names_the_field(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse(text, engine_id="e")
