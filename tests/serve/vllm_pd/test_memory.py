"""`--kv-transfer-backend nixl`: real bytes over UCX on loopback. Skipped where NIXL is not installed."""

import asyncio
from typing import Any

import pytest
from tests.serve.live import live
from tests.serve.vllm_pd.pair import COMPLETION, REMOTE_DECODE, counters, engine_of, pair, until
from tests.serve.vllm_pd.pair import NIXL as KV

from windtunnel.serve.config import UsageError
from windtunnel.serve.nixl import library
from windtunnel.serve.vllm_pd.memory import NixlMover, digests

NIXL: dict[str, Any] = {"kv_transfer__backend": "nixl", "scheduler__num_gpu_blocks": 200, "scheduler__max_model_len": 3000}
FAST = NIXL | {"pacing__time_scale": 20.0}


needs_nixl = pytest.mark.skipif(not library.installed(), reason="NIXL is not installed: pip install --no-deps nixl nixl-cu12")


def test_a_digest_depends_on_everything_before_it() -> None:
    whole, other = list(digests(range(40), 16)), list(digests([1, *range(1, 40)], 16))
    assert len(whole) == 3 and len(set(whole)) == 3
    assert not set(whole) & set(other)
    assert list(digests(range(32), 16)) == whole[:2]


async def test_without_the_package_it_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGE", "windtunnel_has_no_such_package")
    with pytest.raises(UsageError, match="pip install"):
        async with live(kv_transfer__told={"kv_connector": "NixlConnector", "kv_role": "kv_both"}, kv_transfer__backend="nixl"):
            pass


@needs_nixl
@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
async def test_the_text_is_the_single_servers(connector: str) -> None:
    async with live() as single, pair(NIXL | {"kv_transfer__kv_connector": connector}) as pd:
        wanted = (await pd.client.post(f"{single.url}/v1/completions", json=COMPLETION)).json()["choices"]
        for _again in range(2):
            assert (await pd.post("/v1/completions", COMPLETION)).json()["choices"] == wanted
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


@needs_nixl
async def test_a_late_read_finds_somebody_elses_bytes() -> None:
    """As in `test_pair`, but nobody is asked: the bytes say it."""
    async with pair(FAST, p={"scheduler__num_gpu_blocks": 200, "scheduler__enable_prefix_caching": False}) as pd:
        sound = (await pd.post("/v1/completions", COMPLETION)).json()["choices"][0]["text"]
        await pd.until_idle()
        for server in (pd.p, pd.d):
            await pd.client.post(f"{server.url}/reset_prefix_cache")
        params = await pd.prefilled()
        await until(lambda: counters(pd.p) == {"kv_expired_reqs": 1})
        again = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params, "n": 1})
        assert again.json()["choices"][0]["text"] == sound, "nobody has been given the blocks yet"
    async with pair(FAST, p={"scheduler__num_gpu_blocks": 200, "scheduler__enable_prefix_caching": False}) as pd:
        params = await pd.prefilled()
        await until(lambda: counters(pd.p) == {"kv_expired_reqs": 1})
        other = COMPLETION | {"prompt": "[wt:b2] " + "something else " * 400, "max_tokens": 100}
        await pd.client.post(f"{pd.p.url}/v1/completions", json=other)
        answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        assert (answer.status_code, answer.json()["choices"][0]["text"] == sound) == (200, False)
        await pd.until_idle()


@needs_nixl
@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({"kv_transfer__backend": "sim"}, {}),
        ({}, {"kv_transfer__backend": "sim"}),
        ({"kv_transfer__nixl_block_bytes": 8192}, {}),
    ],
)
async def test_both_sides_must_move_the_same(p: dict[str, Any], d: dict[str, Any]) -> None:
    async with pair(FAST, p=p, d=d) as pd:
        assert (await pd.post("/v1/completions", COMPLETION)).status_code == 500
        await pd.until_idle()
        assert counters(pd.d)["failed_transfers"] == 1


@needs_nixl
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_bytes_are_read_frees_both(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL is kept from saying that the read is done until the client has gone."""
    async with pair(NIXL) as pd:
        with monkeypatch.context() as held:
            held.setattr(NixlMover, "_state", lambda _mover, _handle: "PROC")
            client = await pd.decoding(await pd.prefilled(), stream=stream)
            await until(lambda: engine_of(pd.d).outstanding()["loads"])
            client.leave("rst")
            await until(lambda: not pd.d.states())
            assert engine_of(pd.d).outstanding()["orphaned_loads"] == 1
        await pd.until_idle()
        assert counters(pd.p) == counters(pd.d) == {}


@needs_nixl
async def test_a_read_fails_when_the_connection_to_its_prefill_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL says nothing meanwhile."""
    monkeypatch.setattr(NixlMover, "_state", lambda _mover, _handle: "PROC")
    async with pair(NIXL) as pd:
        params = await pd.prefilled()
        asking = asyncio.ensure_future(
            pd.client.post(f"{pd.d.url}/v1/completions", json=COMPLETION | {"kv_transfer_params": params})
        )
        (reader,) = pd.d.server.flavour._connections  # type: ignore[attr-defined]
        await until(lambda: reader._mover._transfers)
        (endpoint,) = reader.transport._endpoints.values()
        reader.transport._connection(endpoint, True)
        assert (await asking).status_code == 500
        assert counters(pd.d) == {"failed_transfers": 1}


@needs_nixl
async def test_an_agent_whose_handshake_is_forgotten_is_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.core.vllm.connector.peers.MAX_PEERS", 1)
    monkeypatch.setattr("windtunnel.serve.vllm_pd.base.MAX_PEERS", 1)
    async with pair(NIXL) as pd, live(kv_transfer__told=KV, kv_transfer__side_channel_port=0, **NIXL) as other:
        for number, prefill in enumerate((pd.p, other, pd.p)):
            asked = COMPLETION | {"prompt": f"{number} and more of it " * 30}
            leg = asked | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
            params = (await pd.client.post(f"{prefill.url}/v1/completions", json=leg)).json()["kv_transfer_params"]
            answer = await pd.client.post(f"{pd.d.url}/v1/completions", json=asked | {"kv_transfer_params": params})
            assert answer.status_code == 200
        (reader,) = pd.d.server.flavour._connections  # type: ignore[attr-defined]
        assert len(reader._mover._remotes) == 1
        await pd.until_idle()
        assert counters(pd.d) == {}
