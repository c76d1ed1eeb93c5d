"""`kv_transfer_params` of strangers among those of a balancer: one request's nonsense touches no other request."""

import asyncio
import json
from typing import Any

import pytest
from tests.serve.vllm_pd.pair import COMPLETION, Pair, counters, engine_of, pair, until

from windtunnel.core.units import S
from windtunnel.core.vllm.connector import params as params_module
from windtunnel.core.vllm.connector.seam import Handshake
from windtunnel.serve.vllm_pd import transport as transport_module
from windtunnel.serve.vllm_pd.memory import NO_REGION
from windtunnel.serve.vllm_pd.side_channel import Found

SLOW_READS: dict[str, Any] = {"pacing__time_scale": 10.0, "kv_transfer__transfer_latency_ns": 8 * S}
"""A read spans a heartbeat of 5 s."""
PUSH: dict[str, Any] = {"kv_transfer__kv_connector": "NixlPushConnector"}
HOSTILE: dict[str, Any] = {
    "remote_request_id": "\ud800",
    "remote_engine_id": "\udfff",
    "remote_host": "\ud800.example",
    "remote_block_ids": [[1 << 40]],
}
INNOCENTS = 6


async def _decode(pd: Pair, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"content-type": "application/json"}
    answer = await pd.client.post(f"{pd.d.url}/v1/completions", content=json.dumps(body).encode(), headers=headers)
    return answer.status_code, answer.json()


def _text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def _prompt(number: int) -> dict[str, Any]:
    return COMPLETION | {"prompt": f"[wt:{number:x}] " + f"word{number} and more of it " * 30}


async def _among_innocents(pd: Pair, hostile: list[dict[str, Any]]) -> tuple[list[int], list[tuple[str, str]]]:
    """The statuses of the hostile bodies; (wanted, seen) of the innocents, which are asked before, between and after."""
    bodies = [_prompt(number) for number in range(INNOCENTS)]
    wanted = [_text((await pd.client.post(f"{pd.p.url}/v1/completions", json=body)).json()) for body in bodies]
    told = [body | {"kv_transfer_params": await pd.prefilled(body)} for body in bodies]
    half = INNOCENTS // 2
    answers = await asyncio.gather(*(_decode(pd, body) for body in told[:half] + hostile + told[half:]))
    innocents = answers[:half] + answers[half + len(hostile) :]
    statuses = [status for status, _answer in answers[half : half + len(hostile)]]
    return statuses, list(zip(wanted, (_text(answer) for _status, answer in innocents), strict=True))


@pytest.mark.parametrize("mode", [{}, PUSH], ids=["pull", "push"])
async def test_hostile_parameters_are_computed_here_and_innocents_are_answered(mode: dict[str, Any]) -> None:
    async with pair(SLOW_READS | mode) as pd:
        sound = await pd.prefilled()
        hostile = [COMPLETION | {"kv_transfer_params": sound | {name: value}} for name, value in HOSTILE.items()]
        statuses, texts = await _among_innocents(pd, hostile)
        assert statuses == [200] * len(HOSTILE)
        assert all(wanted == seen for wanted, seen in texts)
        await pd.until_idle()
        assert counters(pd.d) == {}


async def test_a_push_to_a_request_whose_own_id_cannot_be_written_is_computed_here() -> None:
    async with pair(SLOW_READS | PUSH) as pd:
        body = COMPLETION | {"request_id": "\ud800", "kv_transfer_params": await pd.prefilled()}
        assert (await _decode(pd, body))[0] == 200
        await pd.until_idle()


async def test_what_the_transport_cannot_carry_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the parameters are off: an id that has no bytes reaches heartbeats, questions and notifications."""
    monkeypatch.setattr(params_module, "is_text", lambda told, _limit: isinstance(told, str))
    async with pair(SLOW_READS) as pd:
        hostile = [
            COMPLETION | {"kv_transfer_params": await pd.prefilled() | {"remote_request_id": "\ud800"}} for _ in range(3)
        ]
        statuses, texts = await _among_innocents(pd, hostile)
        assert statuses == [500] * 3
        assert all(wanted == seen for wanted, seen in texts)
        await pd.until_idle()


def _raises(*_args: object) -> None:
    raise RuntimeError("planted")


async def test_a_mover_that_raises_fails_that_move_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(SLOW_READS) as pd:
        mover = pd.d.server.flavour._connections[0]._mover  # type: ignore[attr-defined]
        start, calls = mover.start, iter((_raises,))
        monkeypatch.setattr(mover, "start", lambda move, now_ns: next(calls, start)(move, now_ns))
        told = [_prompt(number) | {"kv_transfer_params": await pd.prefilled(_prompt(number))} for number in range(3)]
        statuses = [status for status, _answer in await asyncio.gather(*(_decode(pd, body) for body in told))]
        assert sorted(statuses) == [200, 200, 500]
        await pd.until_idle()


async def test_false_ids_at_a_true_address_push_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes no such hand, so its transport must not remember it either."""
    monkeypatch.setattr("windtunnel.core.vllm.connector.peers.MAX_PEERS", 2)
    monkeypatch.setattr("windtunnel.serve.vllm_pd.base.MAX_PEERS", 2)
    async with pair() as pd:
        assert (await _decode(pd, COMPLETION | {"kv_transfer_params": await pd.prefilled()}))[0] == 200
        for number in range(3):
            lied = await pd.prefilled() | {"remote_engine_id": f"false-{number}"}
            assert (await _decode(pd, COMPLETION | {"prompt": f"{number} else", "kv_transfer_params": lied}))[0] == 500
        body = _prompt(1)
        assert (await _decode(pd, body | {"kv_transfer_params": await pd.prefilled(body)}))[0] == 200


@pytest.mark.parametrize("endpoint", ["no endpoint at all", "\ud800:1", ""])
async def test_a_side_channel_that_names_no_endpoint_is_a_failed_handshake(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    async with pair({"pacing__time_scale": 10.0}) as pd:
        told = COMPLETION | {"kv_transfer_params": await pd.prefilled()}
        handshake = engine_of(pd.p).handshake

        async def shake_hands(*_args: object) -> tuple[Handshake, Found]:
            return handshake, Found(endpoint, NO_REGION)

        monkeypatch.setattr(transport_module, "shake_hands", shake_hands)
        assert (await _decode(pd, told))[0] == 500
        await pd.until_idle()
        assert (await pd.client.get(f"{pd.d.url}/debug/disaggregation")).json()[0]["transport"]["handshakes_under_way"] == 0


async def test_the_data_plane_listens_on_after_what_an_engine_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(SLOW_READS) as pd:
        told = COMPLETION | {"kv_transfer_params": await pd.prefilled()}
        engine = engine_of(pd.p)
        asked, overwritten = [], engine.overwritten
        calls = iter((_raises,))

        def once(request_id: str, blocks: Any) -> Any:
            asked.append(request_id)
            return next(calls, overwritten)(request_id, blocks)

        monkeypatch.setattr(engine, "overwritten", once)
        first = asyncio.ensure_future(_decode(pd, told))
        await until(lambda: asked)
        other = _prompt(7)
        assert (await _decode(pd, other | {"kv_transfer_params": await pd.prefilled(other)}))[0] == 200
        assert (await first)[0] == 500
        await pd.until_idle()


async def test_side_channels_that_name_ever_new_data_planes_shut_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's side channel is any engine it is asked for, and names another endpoint each time."""
    monkeypatch.setattr("windtunnel.core.vllm.connector.peers.MAX_PEERS", 2)
    monkeypatch.setattr("windtunnel.serve.vllm_pd.base.MAX_PEERS", 2)
    monkeypatch.setattr("windtunnel.serve.pd.sockets.PEERS_LIMIT", 4)
    async with pair({"pacing__time_scale": 10.0}) as pd:
        told, handshake, ports = await pd.prefilled(), engine_of(pd.p).handshake, iter(range(1, 100))

        async def shake_hands(_context: object, peer: Any, _timeout_s: float) -> tuple[Handshake, Found]:
            return handshake._replace(engine_id=peer.engine_id), Found(f"127.0.0.1:{next(ports)}", NO_REGION)

        with monkeypatch.context() as strange:
            strange.setattr(transport_module, "shake_hands", shake_hands)
            strangers = [told | {"remote_engine_id": f"stranger-{number}"} for number in range(8)]
            asked = [_prompt(8 + number) | {"kv_transfer_params": one} for number, one in enumerate(strangers)]
            await asyncio.gather(*(_decode(pd, body) for body in asked))
        body = _prompt(1)
        assert (await _decode(pd, body | {"kv_transfer_params": await pd.prefilled(body)}))[0] == 200
        (connection,) = pd.d.server.flavour._connections  # type: ignore[attr-defined]
        assert len(connection.transport._endpoints) == 2 and len(connection.transport._peers._peers) == 4
