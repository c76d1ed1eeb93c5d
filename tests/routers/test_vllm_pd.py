"""vLLM's prefill/decode behind real routers: what is read, what is held, and who is told when a client leaves."""

from typing import Any

import pytest
from tests.compat import peers
from tests.compat.all import PEERS
from tests.compat.cases import LONG, WORKS, plain
from tests.compat.modes import Mode, Peer
from tests.compat.shapes import CHAT, COMPLETIONS, OF, PROMPT
from tests.compat.site import Site, site
from tests.serve.live import FOREVER_NS, LiveServer, RawClient, request_bytes
from tests.serve.vllm_pd.pair import at_rest, counters, engine_of, holds

from windtunnel.core.vllm.connector.seam import MoveDone
from windtunnel.serve.vllm_pd.base import SimMover
from windtunnel.serve.vllm_pd.flavour import KvTransferFlavour
from windtunnel.serve.vllm_pd.mooncake import MooncakeTransport

MODES = [(peer, mode) for peer in PEERS for mode in peer.modes if mode.pd and mode.engine == "vllm" and not mode.not_run]
every_mode = pytest.mark.parametrize(("peer", "mode"), MODES, ids=[f"{peer.name}: {mode.name}" for peer, mode in MODES])
_MANY_BLOCKS = PROMPT + " and on" * 200


def test_there_are_modes() -> None:
    assert {peer.name for peer, _ in MODES} == {"smg", "vllm-router"} and len(MODES) == 6


async def _nothing_held(made: Site) -> None:
    """Both at rest, and no lease was needed for it."""
    assert await made.until(lambda: all(at_rest(worker.live) for worker in made.workers))
    for worker in made.workers:
        worker.live.server.engine.check_integrity()
        assert counters(worker.live) == {}, worker.role


@every_mode
async def test_the_text_is_a_single_servers_and_the_decode_has_read_it(peer: Peer, mode: Mode) -> None:
    async with site(mode, peers.program(peer.program)) as made:
        decode = made.workers[1].live
        for path in (CHAT, COMPLETIONS):
            for stream in (False, True):
                assert await plain(made, OF[path], stream=stream) == WORKS, (path, stream)
        before = decode.gauge("vllm:external_prefix_cache_hits_total")
        assert (await made.post(COMPLETIONS, OF[COMPLETIONS].body | {"prompt": _MANY_BLOCKS})).status_code == 200
        assert decode.gauge("vllm:external_prefix_cache_hits_total") > before, "the decode computed it itself"
        await _nothing_held(made)


@every_mode
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_frees_both(peer: Peer, mode: Mode, stream: bool) -> None:
    async with site(mode, peers.program(peer.program)) as made:
        client = await RawClient.connect(made.port)
        client.send(request_bytes(COMPLETIONS, OF[COMPLETIONS].body | LONG | {"prompt": _MANY_BLOCKS, "stream": stream}))
        assert await made.until(lambda: "decode" in made.workers[1].live.states())
        client.leave("rst")
        await _nothing_held(made)


@every_mode
async def test_a_client_that_leaves_during_the_prefill_frees_it(peer: Peer, mode: Mode) -> None:
    """By its leg, not by a lease."""
    async with site(mode, peers.program(peer.program)) as made:
        prefill, decode = made.workers
        prefill.told(ttft="1000h")
        client = await RawClient.connect(made.port)
        client.send(request_bytes(CHAT, OF[CHAT].body))
        assert await made.until(lambda: prefill.live.states() == ["prefill"])
        client.leave("fin")
        await _nothing_held(made)
        assert (decode.asked, holds(prefill.live)) == (0, 0)


# Mooncake

MOONCAKE = [(peer, mode) for peer, mode in MODES if mode.connector == "mooncake"]
mooncake_mode = pytest.mark.parametrize(
    ("peer", "mode"), MOONCAKE, ids=[f"{peer.name}{', gRPC' * mode.grpc}" for peer, mode in MOONCAKE]
)


@mooncake_mode
async def test_both_pools_metrics_show_what_mooncake_has_moved(peer: Peer, mode: Mode) -> None:
    """The prefill writes and observes; the decode counts the whole prompt as loaded from elsewhere."""
    async with site(mode, peers.program(peer.program)) as made:
        prefill, decode = (worker.live for worker in made.workers)
        writes, hits = "vllm:mooncake_bytes_transferred_count", "vllm:external_prefix_cache_hits_total"
        before = prefill.gauge(writes), decode.gauge(hits)
        answer = await made.post(COMPLETIONS, OF[COMPLETIONS].body | {"prompt": _MANY_BLOCKS})
        assert prefill.gauge(writes) == before[0] + 1
        assert decode.gauge(hits) == before[1] + answer.json()["usage"]["prompt_tokens"]
        assert prefill.gauge("vllm:mooncake_xfer_time_seconds_count") and not decode.gauge(writes)
        assert [one.body["kv_transfer_params"].keys() for one in made.workers[1].posts] == [
            {"do_remote_decode", "do_remote_prefill", "transfer_id", "remote_bootstrap_addr", "remote_engine_id"}
        ] * (not mode.grpc)
        await _nothing_held(made)


def _transport(prefill: LiveServer) -> MooncakeTransport:
    flavour = prefill.server.flavour
    assert isinstance(flavour, KvTransferFlavour)
    transport = flavour._connections[0].transport
    assert isinstance(transport, MooncakeTransport)
    return transport


def _never_lands(prefill: LiveServer) -> None:
    """Writes from here on."""
    mover = _transport(prefill)._mover
    assert isinstance(mover, SimMover)
    mover.backend._latency_ns = FOREVER_NS


def _land(prefill: LiveServer) -> None:
    """End the write that is under way."""
    (number,) = _transport(prefill)._moves
    _transport(prefill)._ended(MoveDone(number))


@mooncake_mode
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_while_mooncake_writes_leaves_no_blocks(peer: Peer, mode: Mode, stream: bool) -> None:
    """The write goes on into blocks that are nobody's any more; then both are free, and nobody has waited for a time-out.

    smg does not close the decode's leg of a stream that has no token yet, over HTTP; over gRPC it sends `Abort`.
    """
    async with site(mode, peers.program(peer.program)) as made:
        prefill, decode = (worker.live for worker in made.workers)
        _never_lands(prefill)
        client = await RawClient.connect(made.port)
        client.send(request_bytes(COMPLETIONS, OF[COMPLETIONS].body | {"prompt": _MANY_BLOCKS, "stream": stream}))
        assert await made.until(lambda: _transport(prefill)._moves)
        client.leave("rst")
        if not (stream and peer.name == "smg") or mode.grpc:
            assert await made.until(lambda: engine_of(decode).outstanding()["orphaned_loads"])
        assert holds(prefill) == 1
        _land(prefill)
        await _nothing_held(made)


@mooncake_mode
@pytest.mark.parametrize(
    ("more", "right"), [({"prompt": [PROMPT, "[wt:9] b"]}, 1), ({"prompt": PROMPT, "n": 2}, 2)], ids=["two prompts", "n = 2"]
)
async def test_several_choices_under_mooncakes_one_transfer_id(
    peer: Peer, mode: Mode, more: dict[str, Any], right: int
) -> None:
    """The router names one transfer for the whole body. Of what a prefill is asked for only the last is let go; of two prompts
    one is answered from the other's blocks. With `n` above 1 smg asks the decode alone. Over gRPC it asks for each prompt by
    itself, and once for all choices of one, so that nothing is mixed up or stranded.
    """
    async with site(mode, peers.program(peer.program)) as made:
        expected, answer = await made.both(COMPLETIONS, OF[COMPLETIONS].body | more)
        texts = [[choice["text"] for choice in one.json()["choices"]] for one in (expected, answer)]
        alike = [theirs == ours for theirs, ours in zip(*texts, strict=True)].count(True)
        prefill = made.workers[0]
        bodies = 3 - right if mode.grpc else peer.name != "smg" or "n" not in more
        assert (alike, prefill.asked) == (2 if mode.grpc else right, bodies)
        assert engine_of(prefill.live).outstanding()["stranded"] == (0 if mode.grpc else bodies)
