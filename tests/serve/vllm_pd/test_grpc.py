"""Both legs over gRPC, as smg sends them (clients §4.2): the parameters as JSON, and the connector in `GetServerInfo`."""

import json
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tests.serve.grpc_live import answer, completes, grpc_live, request
from tests.serve.vllm_pd.pair import NIXL, at_rest, until

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


async def test_a_router_learns_which_connector_there_is() -> None:
    async with grpc_live(**KV, kv_transfer__engine_id="mine") as server:
        told = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (told.kv_connector, told.kv_role, told.kv_engine_id) == ("NixlConnector", "kv_both", "mine")
    async with grpc_live() as server:
        assert (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).kv_connector == ""
