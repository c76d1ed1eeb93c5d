"""Spliced chunks are byte for byte what protobuf makes of the same values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from tests.wire.vllm_env import env

from windtunnel.wire.family import Delta, TokenLogprob, Usage
from windtunnel.wire.grpc_chunks import varint
from windtunnel.wire.grpc_sglang import SchedulerEncoder, SchedulerSpec
from windtunnel.wire.grpc_vllm import GenerateEncoder, GenerateSpec

COUNTS = st.integers(0, 2**32 - 1)
IDS = st.lists(COUNTS, min_size=1, max_size=5).map(tuple)


@pytest.mark.parametrize(("value", "encoded"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02")])
def test_varints(value: int, encoded: bytes) -> None:
    assert varint(value) == encoded


@given(ids=IDS, prompt=st.integers(1, 40_000), cached=COUNTS, index=st.integers(0, 300))
def test_a_plain_chunk_of_vllm(ids: tuple[int, ...], prompt: int, cached: int, index: int) -> None:
    encoder = GenerateEncoder(GenerateSpec(env(), (1,) * prompt, None, None))
    usage = Usage(prompt, 0, 0)
    encoder.messages(Delta(index, "", (5,)), usage)
    usage.count_cached(cached, 0)
    (spliced,) = encoder.messages(Delta(index, "x", ids), usage)
    chunk = vllm.GenerateStreamChunk(
        token_ids=ids, prompt_tokens=prompt, completion_tokens=len(ids), cached_tokens=cached, index=index
    )
    assert spliced == vllm.GenerateResponse(chunk=chunk).SerializeToString(deterministic=True)


@given(ids=IDS, first=IDS, prompt=st.integers(1, 40_000), cached=COUNTS, index=st.integers(0, 2), name=st.text(max_size=40))
def test_a_plain_chunk_of_sglang(
    ids: tuple[int, ...], first: tuple[int, ...], prompt: int, cached: int, index: int, name: str
) -> None:
    spec = SchedulerSpec(env(), name, (1,) * prompt, 3, None, -1)  # type: ignore[arg-type]
    encoder, usage = SchedulerEncoder(spec), Usage(prompt, 0, 0)
    encoder.messages(Delta(index, "", first), usage)
    usage.count_cached(cached, 0)
    (spliced,) = encoder.messages(Delta(index, "x", ids), usage)
    chunk = sglang.GenerateStreamChunk(
        token_ids=ids, prompt_tokens=prompt, completion_tokens=len(first) + len(ids), cached_tokens=cached, index=index
    )
    assert spliced == sglang.GenerateResponse(request_id=name, chunk=chunk).SerializeToString(deterministic=True)


def test_what_is_not_plain_is_a_message() -> None:
    """The first chunk, logprobs, the end, and a delta without tokens."""
    encoder, usage = GenerateEncoder(GenerateSpec(env(), (1,), 1, None)), Usage(1, 0, 0)
    logprob = TokenLogprob(7, "x", -0.5, ())
    odd = (Delta(0, "", (5,)), Delta(0, "", (7,), (logprob,)), Delta(0, "", ()), Delta(0, "", (7,), None, "length"))
    for delta in odd:
        assert not any(isinstance(one, bytes) for one in encoder.messages(delta, usage))
    assert isinstance(encoder.messages(Delta(0, "", (7,)), usage)[0], bytes)
