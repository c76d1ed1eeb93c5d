"""Both legs over gRPC, as smg sends them (clients §4.2): the parameters as JSON, and the connector in `GetServerInfo`."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.serve.grpc_live import answer, completes, grpc_live, request
from tests.serve.live import FOREVER_NS
from tests.serve.vllm_pd.pair import NIXL, at_rest, counters, until

KV: dict[str, Any] = {"kv_transfer__told": NIXL, "kv_transfer__side_channel_port": 0}
TEXT = "[wt:a1] " + "prefill and then decode " * 30


async def test_the_prefills_parameters_make_the_decode_read() -> None:
    async with grpc_live(**KV) as p, grpc_live(**KV) as d:
        asked = request(TEXT, stream=False, max_tokens=1)
        asked.kv_transfer_params_json = json.dumps({"do_remote_decode": True, "do_remote_prefill": False})
        (prefilled,) = completes(await answer(p, asked))
        asked = request(TEXT, stream=False, max_tokens=8)
        asked.kv_transfer_params_json = prefilled.kv_transfer_params_json
        (decoded,) = completes(await answer(d, asked))
        (single,) = completes(await answer(p, request(TEXT, stream=False, max_tokens=8)))
        assert list(decoded.output_ids) == list(single.output_ids)
        assert d.live.gauge("vllm:nixl_xfer_time_seconds_count") == 1
        await until(lambda: at_rest(p.live) and at_rest(d.live))


@pytest.mark.parametrize("why", ["bad parameter", "overloaded"])
async def test_a_refusal_releases_the_prefill(why: str) -> None:
    """Whether the front end finds it or the engine: the prefill need not wait for its lease."""
    few: dict[str, Any] = {"scheduler__max_num_queued_reqs": 1, "scheduler__max_num_seqs": 1, "pacing__itl_ns": FOREVER_NS}
    async with grpc_live(**KV) as p, grpc_live(**KV, **(few if why == "overloaded" else {})) as d:
        asked = request(TEXT, stream=False, max_tokens=1)
        asked.kv_transfer_params_json = json.dumps({"do_remote_decode": True, "do_remote_prefill": False})
        (prefilled,) = completes(await answer(p, asked))
        assert not at_rest(p.live)
        other = asyncio.ensure_future(answer(d, request(TEXT)))
        if why == "overloaded":
            await until(lambda: d.live.states() == ["decode"])
        asked = request(TEXT, stream=False, temperature=-1.0 if why == "bad parameter" else 1.0)
        asked.kv_transfer_params_json = prefilled.kv_transfer_params_json
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(d, asked)
        assert refused.value.code() is _REFUSED[why]
        await until(lambda: at_rest(p.live))
        other.cancel()
        await until(lambda: at_rest(d.live))
        assert counters(p.live) == counters(d.live) == {}


_REFUSED = {"bad parameter": grpc.StatusCode.INVALID_ARGUMENT, "overloaded": grpc.StatusCode.UNAVAILABLE}


async def test_a_router_learns_which_connector_there_is() -> None:
    async with grpc_live(**KV, kv_transfer__engine_id="mine") as server:
        told = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (told.kv_connector, told.kv_role, told.kv_engine_id) == ("NixlConnector", "kv_both", "mine")
    async with grpc_live() as server:
        assert (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).kv_connector == ""
