"""What engines with the Mooncake connector tell one another, as bytes: vLLM's names and shapes, and what is refused."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core.vllm.connector.seam import Peer, Pull, Pulled, Pulls
from windtunnel.wire.vllm.mooncake import (
    MAX_BLOCK_BYTES,
    EngineEntry,
    MooncakeError,
    decode_answers,
    decode_pulls,
    encode_answer,
    encode_error,
    encode_pulls,
    engine_ids,
    query_answer,
    worker_addresses,
)

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
blocks = st.lists(st.integers(0, 1 << 30)).map(tuple)
pulls = st.builds(
    Pulls,
    st.builds(Peer, ids, ids, st.integers(1, 65535), st.integers(1, 1024)),
    st.lists(st.builds(Pull, ids, ids, blocks), min_size=1, max_size=5, unique_by=lambda pull: pull.request_id).map(tuple),
    st.integers(1, MAX_BLOCK_BYTES),
)


@given(pulls)
def test_a_pull_comes_back_as_it_was(told: Pulls) -> None:
    assert decode_pulls(encode_pulls(told)) == told


@given(
    st.builds(Pulled, ids, st.none(), st.text(max_size=40), st.booleans())
    | st.builds(Pulled, ids, ids, st.just(""), st.booleans())
)
def test_an_answer_comes_back_as_it_was(told: Pulled) -> None:
    assert decode_answers(encode_answer(told)) == ((told,), None)


def test_the_names_are_vllms() -> None:
    decode = Peer("engine-d", "10.0.0.1", 7000, 2)
    told = msgspec.msgpack.decode(encode_pulls(Pulls(decode, (Pull("d", "xfer-1", (3, 4)), Pull("e", "xfer-2", ())), 64)))
    assert told == {
        "remote_hostname": "10.0.0.1",
        "remote_port": 7000,
        "remote_tp_size": 2,
        "remote_tp_rank": 0,
        "req_blocks": {"d": ["xfer-1", [[3, 4]]], "e": ["xfer-2", []]},
        "kv_caches_base_addr": [],
        "block_lens": [64],
        "kv_block_lens": [64],
        "windtunnel_engine_id": "engine-d",
    }
    assert msgspec.msgpack.decode(encode_answer(Pulled("d", None, "x"))) == {
        "status": 0,
        "ok_reqs": ["d"],
        "windtunnel_digests": {"d": "x"},
    }
    assert msgspec.msgpack.decode(encode_answer(Pulled("d", "no", last=False))) == {
        "status": 1,
        "err_reqs": ["d"],
        "err_msg": "no",
    }
    assert msgspec.msgpack.decode(encode_error("no")) == {"status": 2, "err_msg": "no"}


def test_whatever_is_no_finish_and_no_continue_fails_the_whole_pull() -> None:
    assert decode_answers(encode_error("no")) == ((), "no")
    assert decode_answers(msgspec.msgpack.encode({"status": 3, "ok_reqs": ["d"]})) == ((), "unknown error")


def pull(**changes: Any) -> bytes:
    told = msgspec.msgpack.decode(encode_pulls(Pulls(Peer("e", "h", 1), (Pull("d", "t", (1,)),), 64)))
    return msgspec.msgpack.encode({name: value for name, value in (told | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"windtunnel_engine_id": None}, "an engine with real memory"),
        ({"windtunnel_engine_id": "e" * 2000}, "too long"),
        ({"remote_hostname": ""}, "no text"),
        ({"remote_port": 0}, "out of range"),
        ({"remote_tp_size": 0}, "out of range"),
        ({"remote_port": None}, "not a pull"),
        ({"kv_block_lens": []}, "the bytes of a block, 1 to"),
        ({"kv_block_lens": [0]}, "the bytes of a block, 1 to"),
        ({"kv_block_lens": [64, 64]}, "the bytes of a block, 1 to"),
        ({"req_blocks": {}}, "a pull of 0 requests"),
        ({"req_blocks": {"": ["t", [[1]]]}}, "an id is empty"),
        ({"req_blocks": {"d": ["", [[1]]]}}, "an id is empty"),
        ({"req_blocks": {"d": ["t", [[-1]]]}}, "block ids from 0"),
        ({"req_blocks": {"d": ["t", [[1], [2]]]}}, "KV group count mismatch"),
        ({"req_blocks": {"d": ["t", 3]}}, "not a pull"),
        ({"req_blocks": {f"d{at}": ["t", []] for at in range(5000)}}, "a pull of 5000 requests"),
    ],
)
def test_pulls_that_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(MooncakeError, match=what):
        decode_pulls(pull(**changes))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (decode_pulls, decode_answers, worker_addresses):
        with contextlib.suppress(MooncakeError):
            read(data)


def test_what_a_bootstrap_server_says() -> None:
    entries = {0: EngineEntry("e0", {0: {0: "tcp://h:1"}, 1: {0: "tcp://h:2"}}), 1: EngineEntry("e1", {0: {0: "tcp://h:3"}})}
    assert json.loads(query_answer(entries)) == {
        "0": {"engine_id": "e0", "worker_addr": {"0": {"0": "tcp://h:1"}, "1": {"0": "tcp://h:2"}}},
        "1": {"engine_id": "e1", "worker_addr": {"0": {"0": "tcp://h:3"}}},
    }
    assert worker_addresses(query_answer(entries)) == {"e0": "h:1", "e1": "h:3"}
    assert worker_addresses(query_answer({0: EngineEntry("e", {0: {0: "ipc://x"}}), 1: EngineEntry("f", {})})) == {}


def test_ranks_that_are_no_numbers_are_no_engines() -> None:
    entry = {"engine_id": "e", "worker_addr": {}}
    assert engine_ids(json.dumps({"3": entry, "x": entry, "9" * 5000: entry}).encode()) == {3: "e"}
    with pytest.raises(MooncakeError, match="0 engines are registered"):
        engine_ids(b"{}")
