"""P/D over real sockets: frames, registration, lookups, aborts, heartbeats and timeouts in scaled time."""

import pytest
import zmq
import zmq.asyncio
from tests.core.sglang.driving import make_engine, outputs, request, run
from tests.serve.sglang.pair import live_pair, until

from windtunnel.core.transfer.frames import Frame, Metadata, Outgoing
from windtunnel.serve.sglang.settings import DisaggSettings


async def test_a_pair_answers_as_a_unified_engine_does() -> None:
    async with live_pair() as pair:
        for number in range(5):
            pair.submit(f"r{number}", 100 + number, prompt=150, tokens=6)
        await until(lambda: all(pair.decode.ended(f"r{n}") and pair.prefill.ended(f"r{n}") for n in range(5)))
        unified = make_engine()
        unified.submit([request("r0", 150, 6)], 0)
        want = [token for output in outputs(run(unified), "r0") for token in output.token_ids]
        assert len(want) == 6
        for number in range(5):
            assert pair.decode.tokens(f"r{number}") == want
            assert pair.prefill.ending(f"r{number}")[:2] == ("length", 200)
        await until(pair.empty)
        assert pair.prefill.pd.transport.malformed == pair.decode.pd.transport.malformed == 0


async def test_unequal_ranks_gather_and_share() -> None:
    for tp in ((2, 1), (1, 2)):
        async with live_pair(tp=tp) as pair:
            pair.submit("r", 5)
            await until(lambda pair=pair: pair.decode.ended("r"))  # type: ignore[misc]
            assert pair.decode.ending("r")[:2] == ("length", 200)
            await until(pair.empty)


async def test_a_rank_may_listen_on_several_sockets() -> None:
    async with live_pair(listen_sockets=8) as pair:
        ports = [port for _socket, port in pair.decode.pd.sockets.sockets[0]]
        assert len({port % 128 for port in ports}) == 8 and all(port % 128 for port in ports)
        for room in range(1, 17):
            pair.submit(f"r{room}", room)
        await until(lambda: all(pair.decode.ended(f"r{room}") for room in range(1, 17)))
        assert {pair.decode.ending(f"r{room}")[0] for room in range(1, 17)} == {"length"}


async def test_prefill_rank_is_asked_for_when_rooms_do_not_tell() -> None:
    async with live_pair(DisaggSettings(load_balance_method="round_robin")) as pair:
        pair.submit("r", 77)
        await until(lambda: pair.decode.ended("r"))
        assert pair.decode.ending("r")[0] == "length"


async def test_an_abort_of_the_decode_leg_reaches_the_prefill() -> None:
    """Each leg ends with 500, and everything is given back (reference §5)."""
    async with live_pair() as pair:
        pair.prefill.worker.freeze(1 << 62)
        pair.submit("r", 9)
        await until(lambda: len(pair.decode.worker.transfer_queue) == 1)  # type: ignore[union-attr]
        pair.decode.driver.abort(["r"], notify=True)
        await until(lambda: pair.decode.ended("r"))
        assert pair.decode.ending("r")[1] == 500
        pair.prefill.worker.freeze(0)
        pair.prefill.driver.wake()
        await until(lambda: pair.prefill.ended("r"))
        assert "Aborted by decode-side abort notification." in pair.prefill.ending("r")[2]
        await until(pair.empty)


async def test_an_abort_of_the_prefill_leg_leaves_the_decode_to_its_timeout() -> None:
    """300 s, here in scaled time; then the decode says so and drops what it knew (reference §3.3)."""
    async with live_pair(time_scale=1000) as pair:
        pair.submit("r", 9, legs="d")
        await until(lambda: pair.decode.ended("r"))
        reason, status, message = pair.decode.ending("r")
        assert (reason, status) == ("abort", 500)
        assert "Decode transfer failed" in message and "KVPoll.WaitingForInput" in message
        await until(lambda: not any(pair.decode.worker.outstanding().values()))


async def test_a_prefill_without_decode_ends_at_the_bootstrap_timeout() -> None:
    async with live_pair(time_scale=1000) as pair:
        pair.submit("r", 9, legs="p")
        await until(lambda: pair.prefill.ended("r"))
        assert pair.prefill.ending("r")[1] == 500
        assert "KVPoll.Bootstrapping" in pair.prefill.ending("r")[2]


async def test_a_prefill_that_cannot_be_found_fails_after_fifteen_tries() -> None:
    async with live_pair(time_scale=100) as pair:
        asked: list[str] = []
        fetch = pair.decode.pd.transport.asker.ask

        async def counted(method: str, url: str, *rest: object) -> bytes:
            asked.append(url)
            return await fetch(method, url, *rest)  # type: ignore[arg-type]

        pair.decode.pd.transport.asker.ask = counted  # type: ignore[method-assign]
        pair.decode.submit("r", 9, ("127.0.0.1", 1))
        await until(lambda: pair.decode.ended("r"))
        assert len(asked) == 15
        assert pair.decode.ending("r")[1] == 500
        assert "Could not fetch bootstrap info" in pair.decode.ending("r")[2]


async def test_hostile_bootstrap_hosts_among_innocents_fail_alone() -> None:
    """JSON allows lone surrogates, which no URL and no socket takes."""
    async with live_pair(time_scale=100) as pair:
        hosts = ("\ud800", "a b\n", "[", "x" * 70_000)
        for number in range(4):
            pair.submit(f"r{number}", 100 + number)
            pair.decode.submit(f"h{number}", 200 + number, (hosts[number], 1))
        await until(lambda: all(pair.decode.ended(f"h{n}") and pair.decode.ended(f"r{n}") for n in range(4)))
        assert {pair.decode.ending(f"r{number}")[:2] for number in range(4)} == {("length", 200)}
        assert {pair.decode.ending(f"h{number}")[1] for number in range(4)} == {500}
        await until(pair.empty)


async def test_a_frame_that_cannot_be_sent_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_pair(time_scale=100) as pair:
        pair.submit("first", 1)
        await until(lambda: pair.decode.ended("first"))
        transport = pair.decode.pd.transport
        send = transport._send

        def picky(outgoing: Outgoing, frame: Frame) -> None:
            if isinstance(frame, Metadata) and frame.room == 201:
                raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "planted")
            send(outgoing, frame)

        monkeypatch.setattr(transport, "_send", picky)
        for room in range(200, 204):
            pair.submit(f"r{room}", room)
        await until(lambda: all(pair.decode.ended(f"r{room}") for room in range(200, 204)))
        assert [pair.decode.ending(f"r{room}")[1] for room in range(200, 204)] == [200, 500, 200, 200]
        await until(pair.empty)


async def test_a_lost_prefill_is_noticed_by_two_heartbeats() -> None:
    async with live_pair(time_scale=20) as pair:
        pair.submit("first", 1)
        await until(lambda: pair.decode.ended("first"))
        pair.submit("r", 9, legs="d")
        await until(lambda: len(pair.decode.worker.transfer_queue) == 1)  # type: ignore[union-attr]
        await pair.prefill.close()
        await until(lambda: pair.decode.ended("r"))
        assert "Lost connection with prefill instance" in pair.decode.ending("r")[2]


async def test_a_lost_decode_is_reported_by_the_transport_after_its_time() -> None:
    """The prefill's handles fail 30 s after the decode has gone, and the inflight request with them."""
    async with live_pair(DisaggSettings(bandwidth_gb_s=1e-9), time_scale=100) as pair:
        pair.submit("r", 9)
        await until(lambda: len(pair.prefill.worker.inflight_queue) == 1)  # type: ignore[union-attr]
        await pair.decode.close()
        await until(lambda: pair.prefill.ended("r"))
        assert pair.prefill.ending("r")[1] == 500
        assert "Prefill transfer failed" in pair.prefill.ending("r")[2]


async def test_metadata_that_cannot_be_sent_fails_its_room() -> None:
    async with live_pair(time_scale=1) as pair:
        pair.submit("first", 1)
        await until(lambda: pair.decode.ended("first"))
        topology = pair.decode.worker.prefills[f"127.0.0.1:{pair.address[1]}"]  # type: ignore[union-attr]
        assert topology is not None
        dead = topology._replace(endpoints={(0, 0): "127.0.0.1:1"})
        pair.decode.worker.prefills.learn(f"127.0.0.1:{pair.address[1]}", dead)  # type: ignore[union-attr]
        pair.submit("r", 9, legs="d")
        await until(lambda: pair.decode.ended("r"))
        assert "send_metadata to prefill 127.0.0.1:1 failed" in pair.decode.ending("r")[2]


async def test_strangers_on_the_socket_are_counted_and_harm_nobody() -> None:
    async with live_pair() as pair:
        context = zmq.asyncio.Context()
        push = context.socket(zmq.PUSH)
        push.connect(f"tcp://{pair.prefill.pd.sockets.endpoints[0]}")
        await push.send_multipart([b"HELLO", b"there"])
        await until(lambda: pair.prefill.pd.transport.malformed == 1)
        pair.submit("r", 9)
        await until(lambda: pair.decode.ended("r"))
        assert pair.decode.ending("r")[0] == "length"
        context.destroy(linger=0)
