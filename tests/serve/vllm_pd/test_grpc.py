"""Both legs over gRPC, as smg sends them (clients §4.2): the parameters as JSON, and the connector in `GetServerInfo`."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.serve.grpc_live import GrpcServer, answer, completes, grpc_live, request, streamed_ids
from tests.serve.live import FOREVER_NS
from tests.serve.vllm_pd.pair import (
    AS_IT_IS,
    HELD,
    NIXL,
    REMOTE_DECODE,
    at_rest,
    counters,
    engine_of,
    holds,
    land,
    moving,
    until,
)

KV: dict[str, Any] = {"kv_transfer__told": NIXL, "kv_transfer__side_channel_port": 0}
UNHURRIED: dict[str, Any] = {"pacing__time_scale": 10.0}
TEXT = "[wt:a1] " + "prefill and then decode " * 30
both_ways = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@dataclass(frozen=True)
class Pair:
    p: GrpcServer
    d: GrpcServer

    async def prefilled(self, *, stream: bool = False) -> str:
        """The prefill leg alone: what the decode is to be told."""
        (complete,) = completes(await answer(self.p, leg(json.dumps(REMOTE_DECODE), stream=stream, max_tokens=1)))
        return complete.kv_transfer_params_json

    async def until_idle(self) -> None:
        await until(lambda: at_rest(self.p.live) and at_rest(self.d.live))
        for server in (self.p, self.d):
            server.live.server.engine.check_integrity()


@contextlib.asynccontextmanager
async def pair(
    both: dict[str, Any] = AS_IT_IS, p: dict[str, Any] = AS_IT_IS, d: dict[str, Any] = AS_IT_IS
) -> AsyncIterator[Pair]:
    async with grpc_live(**KV | both | p) as prefill, grpc_live(**KV | both | d) as decode:
        yield Pair(prefill, decode)


def leg(params: str, *, stream: bool = False, max_tokens: int = 8, request_id: str = "") -> pb.GenerateRequest:
    told = request(TEXT, stream=stream, max_tokens=max_tokens, request_id=request_id)
    told.kv_transfer_params_json = params
    return told


@both_ways
async def test_the_prefills_parameters_make_the_decode_read(stream: bool) -> None:
    async with pair() as pd:
        told = await pd.prefilled(stream=stream)
        assert (json.loads(told)["do_remote_prefill"], holds(pd.p.live)) == (True, 1)
        messages = await answer(pd.d, leg(told, stream=stream))
        (single,) = completes(await answer(pd.p, request(TEXT, stream=False, max_tokens=8)))
        (decoded,) = completes(messages)
        assert (streamed_ids(messages) if stream else list(decoded.output_ids)) == list(single.output_ids)
        assert not decoded.HasField("kv_transfer_params_json")
        assert pd.d.live.gauge("vllm:nixl_xfer_time_seconds_count") == 1
        await pd.until_idle()
        assert counters(pd.p.live) == counters(pd.d.live) == {}


async def test_a_router_learns_which_connector_there_is() -> None:
    async with grpc_live(**KV, kv_transfer__engine_id="mine") as server:
        told = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (told.kv_connector, told.kv_role, told.kv_engine_id) == ("NixlConnector", "kv_both", "mine")
    async with grpc_live() as server:
        assert (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).kv_connector == ""


@both_ways
async def test_a_call_that_is_cancelled_while_the_decode_reads_frees_both_when_the_read_has_ended(stream: bool) -> None:
    async with pair(d=HELD) as pd:
        call = pd.d.stub.Generate(leg(await pd.prefilled(), stream=stream))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: moving(pd.d.live))
        call.cancel()
        await until(lambda: not pd.d.live.states())
        assert engine_of(pd.d.live).outstanding()["orphaned_loads"] == 1
        land(pd.d.live)
        await pd.until_idle()
        assert counters(pd.p.live) == counters(pd.d.live) == {}
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reading


@both_ways
async def test_an_abort_by_id_while_the_decode_reads_ends_the_call_and_tells_the_prefill(stream: bool) -> None:
    """`Abort` is what smg sends for a client that has left a stream."""
    async with pair(d=HELD) as pd:
        asking = asyncio.ensure_future(answer(pd.d, leg(await pd.prefilled(), stream=stream, request_id="mine")))
        await until(lambda: moving(pd.d.live))
        await pd.d.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        assert [complete.finish_reason for complete in completes(await asking)] == ["abort"]
        land(pd.d.live)
        await pd.until_idle()
        assert counters(pd.p.live) == counters(pd.d.live) == {}


@both_ways
async def test_an_aborted_prefill_holds_nothing_and_answers_no_parameters(stream: bool) -> None:
    async with pair(p={"pacing__ttft_ns": FOREVER_NS}) as pd:
        told = leg(json.dumps(REMOTE_DECODE), stream=stream, max_tokens=1, request_id="mine")
        asking = asyncio.ensure_future(answer(pd.p, told))
        await until(lambda: pd.p.live.states() == ["prefill"])
        await pd.p.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        (complete,) = completes(await asking)
        assert (complete.finish_reason, complete.HasField("kv_transfer_params_json")) == ("abort", False)
        await pd.until_idle()
        assert counters(pd.p.live) == {}


async def test_between_the_legs_nobody_tells_the_prefill() -> None:
    async with pair(UNHURRIED) as pd:
        await pd.prefilled()
        assert holds(pd.p.live) == 1
        await pd.until_idle()
        assert counters(pd.p.live) == {"kv_expired_reqs": 1}


@both_ways
async def test_a_refusal_by_the_decode_releases_the_prefill(stream: bool) -> None:
    """smg-grpc-servicer 0.14.1, `_notify_kv_transfer_rejected`: whatever fails before the engine has started."""
    async with pair(UNHURRIED, d={"scheduler__max_model_len": 64}) as pd:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(pd.d, leg(await pd.prefilled(), stream=stream))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await pd.until_idle()
        assert counters(pd.p.live) == {}


@both_ways
async def test_an_overloaded_decode_releases_the_prefill(stream: bool) -> None:
    full = {"scheduler__max_num_queued_reqs": 1, "scheduler__max_num_seqs": 1, "pacing__itl_ns": FOREVER_NS}
    async with pair(UNHURRIED, d=full) as pd:
        other = asyncio.ensure_future(answer(pd.d, request(TEXT, stream=True, max_tokens=8, request_id="other")))
        await until(lambda: pd.d.live.states() == ["decode"])
        with pytest.raises(grpc.aio.AioRpcError):
            await answer(pd.d, leg(await pd.prefilled(), stream=stream))
        await until(lambda: holds(pd.p.live) == 0)
        assert counters(pd.p.live) == {}
        other.cancel()
        await pd.until_idle()
