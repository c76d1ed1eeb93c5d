"""Mooncake over real sockets: the bootstrap server, both orders of the legs, clients that leave, processes that go."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.serve.live import FOREVER_NS, PATIENCE_S, live
from tests.serve.vllm_pd.mooncake_pair import CONSUMER, PRODUCER, MooncakePair, counters, mooncake
from tests.serve.vllm_pd.pair import COMPLETION, HELD, _connection, at_rest, engine_of, holds, land, moving, until
from tests.serve.vllm_pd.test_pair import BODIES, _text

from windtunnel.core.vllm.connector.seam import Peer
from windtunnel.serve.beside import Beside
from windtunnel.serve.vllm_pd.bootstrap import WORKERS_LIMIT, Registry, build
from windtunnel.wire.vllm.mooncake import Registration

FAST: dict[str, Any] = {"pacing__time_scale": 400.0}
"""A patience of 1.2 s, for tests in which it runs out."""

ONE_PLACE: dict[str, Any] = {"scheduler__max_num_seqs": 1, "pacing__itl_ns": FOREVER_NS}


@contextlib.asynccontextmanager
async def busy(pd: MooncakePair) -> AsyncIterator[None]:
    """Somebody has the decode's only place; in the end everything is given back."""
    other = asyncio.ensure_future(pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION))
    await until(lambda: pd.d.states() == ["decode"])
    yield
    other.cancel()
    await pd.until_idle()


def pulls(server: Any) -> int:
    return engine_of(server).outstanding()["pulls"]


@pytest.mark.parametrize("path", BODIES)
async def test_the_text_is_the_single_servers_and_everything_is_given_back(path: str) -> None:
    body = BODIES[path]
    async with live() as single, httpx.AsyncClient(trust_env=False) as client:
        wanted = _text(path, (await client.post(single.url + path, json=body)).json())
    assert len(wanted.split()) == 12
    async with mooncake() as pd:
        assert _text(path, (await pd.both(path, body)).json()) == wanted
        transfer_id = pd.transfer()
        assert (await pd.prefill(transfer_id, path, body)).json().get("kv_transfer_params") is None
        assert holds(pd.p) == 1
        assert _text(path, (await pd.decode(transfer_id, path, body)).json()) == wanted
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


async def test_both_pools_metrics_show_the_transfer() -> None:
    async with mooncake() as pd:
        await pd.both()
        tokens = await pd.client.post(
            f"{pd.d.url}/tokenize", json={"model": COMPLETION["model"], "prompt": COMPLETION["prompt"]}
        )
        assert pd.d.gauge("vllm:external_prefix_cache_hits_total") == tokens.json()["count"]
        assert pd.p.gauge("vllm:mooncake_bytes_transferred_count") == 1
        assert pd.p.gauge("vllm:mooncake_xfer_time_seconds_count") == 1
        assert pd.d.gauge("vllm:mooncake_bytes_transferred_count") == 0


async def test_what_the_bootstrap_server_says() -> None:
    async with mooncake() as pd:
        told = await pd.transport(pd.p)
        url = told["bootstrap"]
        engine_id = engine_of(pd.p).connector.config.engine_id
        answer = await pd.client.get(f"{url}/query")
        address = f"tcp://127.0.0.1:{told['pull_port']}"
        assert answer.json() == {"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": address}}}}
        assert (await pd.transport(pd.d))["bootstrap"] is None
        same = {"engine_id": engine_id, "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": address}
        assert (await pd.client.post(f"{url}/register", json=same)).json() == {"status": "ok"}
        for wrong, text in (({"engine_id": "x"}, "Engine ID mismatch"), ({"addr": "tcp://q:1"}, "already registered at")):
            refused = await pd.client.post(f"{url}/register", json=same | wrong)
            assert refused.status_code == 400 and text in refused.json()["detail"]
        bad = await pd.client.post(f"{url}/register", json={"engine_id": "x"})
        assert bad.status_code == 422 and bad.json()["detail"][0]["loc"] == ["dp_rank"]
        assert (await pd.client.get(f"{url}/elsewhere")).status_code == 404
        assert (await pd.client.put(f"{url}/query")).status_code == 405


def test_a_bootstrap_server_knows_so_many_workers_and_no_more() -> None:
    registry = Registry()
    same = {"engine_id": "e", "dp_rank": 0, "pp_rank": 0, "addr": "tcp://h:1"}
    told = [Registration.model_validate({**same, "tp_rank": rank}) for rank in range(WORKERS_LIMIT + 1)]
    assert {registry.register(one)[0] for one in told[:-1]} == {200}
    assert registry.register(told[-1])[0] == 400
    assert registry.register(told[0])[0] == 200, "the same again is no further one"


async def test_the_decode_may_come_long_before_the_prefill() -> None:
    async with mooncake() as pd:
        transfer_id = pd.transfer()
        decoding = asyncio.create_task(pd.decode(transfer_id))
        await until(lambda: pulls(pd.p) == 1)
        assert not decoding.done() and pd.p.states() == []
        await pd.prefill(transfer_id)
        assert (await decoding).status_code == 200
        await pd.until_idle()


# Clients that leave


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_the_decode_before_it_is_scheduled_lets_go(stream: bool) -> None:
    async with mooncake(d=ONE_PLACE) as pd, busy(pd):
        transfer_id = pd.transfer()
        await pd.prefill(transfer_id)
        client = await pd.leaving(pd.d, await pd.to_d(transfer_id), stream=stream)
        await until(lambda: len(pd.d.states()) == 2)
        client.leave("fin")
        await until(lambda: at_rest(pd.p))
        assert counters(pd.p) == counters(pd.d) == {}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_the_decode_while_it_is_written_to_frees_both(stream: bool) -> None:
    async with mooncake(p=HELD) as pd:
        transfer_id = pd.transfer()
        await pd.prefill(transfer_id)
        client = await pd.leaving(pd.d, await pd.to_d(transfer_id), stream=stream)
        await until(lambda: moving(pd.p))
        client.leave("rst")
        await until(lambda: engine_of(pd.d).outstanding()["orphaned_loads"])
        assert holds(pd.p) == 1
        land(pd.p)
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_while_the_decode_generates(stream: bool) -> None:
    async with mooncake(d={"pacing__itl_ns": FOREVER_NS}) as pd:
        transfer_id = pd.transfer()
        await pd.prefill(transfer_id)
        client = await pd.leaving(pd.d, await pd.to_d(transfer_id), stream=stream)
        await until(lambda: pd.d.states() == ["decode"] and at_rest(pd.p))
        client.leave("fin")
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


async def test_a_client_that_leaves_the_prefill_leaves_the_decode_waiting() -> None:
    """Until the patience of the prefill is over: then the decode fails."""
    async with mooncake(FAST, p={"pacing__ttft_ns": FOREVER_NS}) as pd:
        transfer_id = pd.transfer()
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        client = await pd.leaving(pd.p, params)
        decoding = asyncio.create_task(pd.decode(transfer_id))
        await until(lambda: pulls(pd.p) == 1)
        client.leave("fin")
        answer = await decoding
        assert answer.status_code == 500
        assert counters(pd.d) == {"failed_recvs": 1}
        await pd.until_idle()


async def test_blocks_that_nobody_pulls_are_given_back_in_the_end() -> None:
    async with mooncake(FAST) as pd:
        await pd.prefill(pd.transfer())
        await until(lambda: not holds(pd.p))
        assert counters(pd.p) == {"kv_expired_reqs": 1}
        await pd.until_idle()


async def test_a_refused_decode_lets_go_of_the_prefills_blocks() -> None:
    async with mooncake() as pd:
        transfer_id = pd.transfer()
        await pd.prefill(transfer_id)
        refused = await pd.decode(transfer_id, body=COMPLETION | {"max_tokens": 10_000_000})
        assert refused.status_code == 400
        await pd.until_idle()
        assert counters(pd.p) == {}


async def test_an_overloaded_decode_lets_go_of_the_prefills_blocks() -> None:
    async with mooncake(d=ONE_PLACE | {"scheduler__max_num_queued_reqs": 1}) as pd, busy(pd):
        transfer_id = pd.transfer()
        await pd.prefill(transfer_id)
        assert (await pd.decode(transfer_id)).status_code == 503
        await until(lambda: at_rest(pd.p))
        assert counters(pd.p) == counters(pd.d) == {}


async def test_a_decode_that_is_refused_before_its_prefill_has_come_lets_go_as_soon_as_it_has() -> None:
    async with mooncake() as pd:
        transfer_id = pd.transfer()
        assert (await pd.decode(transfer_id, body=COMPLETION | {"max_tokens": 10_000_000})).status_code == 400
        await until(lambda: pulls(pd.p) == 1)
        await pd.prefill(transfer_id)
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


# Failures, and n


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_failed_write_is_an_error(stream: bool) -> None:
    async with mooncake(p={"kv_transfer__fates": (("fail", 1.0),)}) as pd:
        answer = await pd.both(body=COMPLETION | {"stream": stream})
        if stream:
            assert (answer.status_code, json.loads(answer.text.split("data: ")[1])["error"]["code"]) == (200, 500)
        else:
            assert answer.status_code == 500
        assert (counters(pd.p), counters(pd.d), holds(pd.p)) == ({"failed_transfers": 1}, {"failed_recvs": 1}, 1)


async def test_blocks_of_another_size_are_refused() -> None:
    async with mooncake(d={"scheduler__block_size": 32, "kv_transfer__kv_load_failure_policy": "recompute"}) as pd:
        answer = await pd.both()
        alone = await pd.client.post(f"{pd.p.url}/v1/completions", json=COMPLETION)
        assert answer.json()["choices"] == alone.json()["choices"]
        assert (counters(pd.p), counters(pd.d), holds(pd.p)) == ({}, {"failed_recvs": 1}, 1)


async def test_n_choices_share_one_transfer_and_strand_the_other_s_blocks() -> None:
    """The router names one transfer for all: whoever holds last is pulled from, by both decodes."""
    async with mooncake(p={"scheduler__enable_prefix_caching": False}) as pd:
        transfer_id, body = pd.transfer(), COMPLETION | {"n": 2}
        await pd.prefill(transfer_id, body=body)
        assert engine_of(pd.p).outstanding() == {"holds": 1, "loads": 0, "orphaned_loads": 0, "stranded": 1, "pulls": 0}
        answer = await pd.decode(transfer_id, body=body)
        alone = await pd.client.post(f"{pd.p.url}/v1/completions", json=body)
        assert answer.json()["choices"] == alone.json()["choices"]
        await until(lambda: at_rest(pd.d) and not holds(pd.p))
        assert engine_of(pd.p).outstanding()["stranded"] == 1 and counters(pd.d) == {}


# What is not there


async def test_a_bootstrap_server_that_does_not_answer_fails_the_request() -> None:
    async with mooncake(FAST) as pd:
        params = await pd.to_d(pd.transfer(), remote_bootstrap_addr="http://127.0.0.1:1")
        answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert answer.status_code == 500 and counters(pd.d) == {"failed_recvs": 1}
        await pd.until_idle()


async def test_an_engine_that_the_bootstrap_server_does_not_know() -> None:
    recompute = {"kv_transfer__kv_load_failure_policy": "recompute"}
    async with mooncake(d=recompute) as pd:
        params = await pd.to_d(pd.transfer(), remote_engine_id="another")
        answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert answer.status_code == 200 and counters(pd.d) == {"failed_recvs": 1}
        await pd.until_idle()


async def test_what_bootstrap_servers_say_of_others_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients name these servers, so what they say has to end somewhere."""
    monkeypatch.setattr("windtunnel.serve.vllm_pd.base.MAX_PEERS", 2)
    async with mooncake() as pd:
        transport: Any = _connection(pd.d).transport

        async def query(_peer: Peer) -> dict[str, str]:
            return {f"e{number}": "127.0.0.1:1" for number in range(100)}

        monkeypatch.setattr(transport, "_query", query)
        for engine_id in ("e1", "e2", "e1", "e3"):
            await transport._greet(Peer(engine_id, "127.0.0.1", 1))
        assert [peer.engine_id for peer in transport._workers] == ["e1", "e3"]


async def test_a_false_bootstrap_address_harms_nobody_else() -> None:
    """A stranger's server says that the good engine is where nothing can be, before anybody has asked the good server."""
    async with mooncake() as pd:
        engine_id = engine_of(pd.p).connector.config.engine_id
        registry = Registry()
        registry.register(Registration(engine_id=engine_id, dp_rank=0, tp_rank=0, pp_rank=0, addr="tcp://nowhere"))
        false = Beside(build(registry), "127.0.0.1", 0)
        await false.start()
        params = await pd.to_d(pd.transfer(), remote_bootstrap_addr=false.url)
        lied = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert lied.status_code == 500
        assert (await pd.both()).status_code == 200
        await pd.until_idle()
        await false.close()


async def test_two_ranks_share_one_bootstrap_server() -> None:
    told = {"kv_transfer__told": PRODUCER, "kv_transfer__mooncake_bootstrap_port": 0, "data_parallel_size": 2}
    async with live(**told) as server, httpx.AsyncClient(trust_env=False) as client:
        parts = (await client.get(f"{server.url}/debug/disaggregation")).json()
        urls = {part["transport"]["bootstrap"] for part in parts}
        assert len(urls) == 1
        known = (await client.get(f"{urls.pop()}/query")).json()
        assert {rank: entry["engine_id"] for rank, entry in known.items()} == {
            str(at): part["engine_id"] for at, part in enumerate(parts)
        }


async def test_a_bootstrap_server_that_runs_elsewhere() -> None:
    async with mooncake() as pd:
        url = (await pd.transport(pd.p))["bootstrap"]
        await pd.client.get(url)
        extra = {"kv_connector_extra_config": {"bootstrap_server_address": url.removeprefix("http://")}}
        with pytest.raises(OSError, match="Engine ID mismatch"):
            async with live(kv_transfer__told=PRODUCER | extra):
                pass
        async with live(kv_transfer__told=CONSUMER | extra):
            pass


async def test_a_pull_of_an_engine_with_real_memory_is_refused_with_a_reason() -> None:
    """And so is what is no pull at all; vLLM answers both with an ERROR."""
    metadata = {
        "remote_hostname": "10.0.0.1", "remote_port": 7000, "remote_tp_size": 1, "remote_tp_rank": 0,
        "req_blocks": {"d": ["xfer", [[1]]]}, "kv_caches_base_addr": [4096], "block_lens": [64], "kv_block_lens": [64],
    }  # fmt: skip
    async with mooncake() as pd:
        port = (await pd.transport(pd.p))["pull_port"]
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://127.0.0.1:{port}")
            for message, what in ((msgspec.msgpack.encode(metadata), "real memory"), (b"\xc1", "not a pull")):
                await socket.send(message)
                async with asyncio.timeout(PATIENCE_S):
                    answer = msgspec.msgpack.decode(await socket.recv())
                assert answer["status"] == 2 and what in answer["err_msg"]
        assert (await pd.transport(pd.p))["malformed_messages"] == 2
        await pd.both()
        await pd.until_idle()
