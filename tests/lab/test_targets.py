"""Targets as people have them: TLS, keys, a router with workers behind it, servers that are nobody's."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.fake_server import FakeServer, answer
from tests.lab.test_findings import PLAN, names
from tests.lab.test_storm_command import SMALL, storm

from windtunnel.core.units import S
from windtunnel.lab.connection import How
from windtunnel.lab.findings import find
from windtunnel.lab.plan import Moment, PlanError, Role, Trigger
from windtunnel.lab.record import End
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import make_target


@asynccontextmanager
async def over_tls(
    certificate: Path, *defects: str, clients: Path | None = None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> AsyncIterator[str]:
    """`clients` vouches for those who may come; None: anybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = version
    context.load_cert_chain(certificate)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    server = FakeServer(frozenset(defects))
    port = await server.start(tls=context)
    try:
        yield f"https://127.0.0.1:{port}"
    finally:
        await server.stop()


@pytest.mark.parametrize("clients", [1, 2])
async def test_a_storm_over_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch, clients: int) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    plan = replace(PLAN, how=(How.FIN, How.RST, How.STOP_READING), stall_ns=1, clients=clients)
    async with over_tls(certificate) as url:
        result = await run_storm(make_target(url, "fake"), plan)
    assert find(result) == ()
    assert {victim.end for victim in result.of(Role.VICTIM)} == {End.LEFT}
    assert result.quiet_ns is not None


async def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: Path) -> None:
    async with over_tls(certificate) as url:
        code, _, err = await storm(url, *SMALL)
    assert code == 2
    assert "CERTIFICATE_VERIFY_FAILED" in err.upper() or "certificate verify failed" in err


@pytest.mark.parametrize("how", [How.HALF_CLOSE, How.KILL])
async def test_what_tls_cannot_do_is_refused_before_a_byte_is_sent(how: How) -> None:
    with pytest.raises(PlanError, match=f"how: {how.value} is for plain HTTP"):
        await run_storm(make_target("https://127.0.0.1:1", "m"), replace(PLAN, how=(how,)))


async def test_keys_are_sent_with_everything_and_shown_nowhere(tmp_path: Path) -> None:
    keys: set[str] = set()
    server = FakeServer()
    inner = await server.start()

    async def guard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on what carries the key."""
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.partition(": ")[::2] for line in head.decode().lower().split("\r\n"))
        keys.add(lines.get("authorization", "none"))
        if lines.get("authorization") != "bearer s3cr3t-0123":
            await answer(writer, 401, '{"error": {"message": "you sent Bearer s3cr3t-0123"}}')
            writer.close()
            return
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", inner)
        upstream.write(head)
        up = asyncio.ensure_future(_pipe(reader, upstream))
        await _pipe(upstream_reader, writer)
        up.cancel()

    front = await asyncio.start_server(guard, "127.0.0.1", 0)
    async with front:
        url = f"http://127.0.0.1:{front.sockets[0].getsockname()[1]}"
        words = ["--header", "Authorization: Bearer s3cr3t-0123", "--out", str(tmp_path), "--json"]
        code, out, err = await storm(url, *SMALL, *words, "--clients", "2")
    await server.stop()
    assert (code, keys) == (0, {"bearer s3cr3t-0123"}), err
    written = await asyncio.to_thread(lambda: [path.read_text() for path in tmp_path.iterdir()])
    assert len(written) == 3
    for text in (out, err, *written):
        assert "s3cr3t" not in text
    assert "authorization: <removed>" in json.loads(out)["reproduce"].lower()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(65_536):
            writer.write(part)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def test_a_router_and_the_workers_behind_it_with_their_own_metrics() -> None:
    workers = [FakeServer(), FakeServer(frozenset({"leak-slot"}))]
    ports = [await worker.start() for worker in workers]
    turn = iter(range(10_000))

    async def route(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", ports[next(turn) % 2])
        up = asyncio.ensure_future(_pipe(reader, upstream))
        await _pipe(upstream_reader, writer)
        up.cancel()

    router = await asyncio.start_server(route, "127.0.0.1", 0)
    async with router:
        url = f"http://127.0.0.1:{router.sockets[0].getsockname()[1]}"
        sources = [f"http://127.0.0.1:{port}/metrics" for port in ports]
        result = await run_storm(make_target(url, "fake", metrics_urls=sources), replace(PLAN, victims=8))
    for worker in workers:
        await worker.stop()
    assert result.front
    assert "slot_leak" in names(find(result))
    assert max(sample.gauges["running"] for sample in result.samples) > 8 / 2


async def test_known_answers_of_a_foreign_server_are_compared_word_for_word() -> None:
    """Without the oracle's words: three prompts are asked twice before, and once after the storm."""
    server = FakeServer(frozenset({"short"}))
    port = await server.start()
    try:
        result = await run_storm(make_target(f"http://127.0.0.1:{port}", "fake"), replace(PLAN, oracle="off", known=3))
    finally:
        await server.stop()
    found = {one.name: one for one in find(result)}
    assert "alike twice before the storm" in found["corrupt_stream"].evidence[0]
    assert any("3 of 3 prompts" in note for note in result.notes)
    assert set(found) == {"corrupt_stream"}  # what is asked after the last sample is not missed in it


async def test_a_watched_gauge_of_an_unknown_server_shows_its_leak() -> None:
    stuck = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal stuck
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/metrics" in head:
            await answer(writer, 200, f"my_busy_slots {stuck}\n")
        elif head.startswith(b"GET"):
            await answer(writer, 404, "")
        else:
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
            left = await _left_early(writer, reader)
            stuck += left
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    plan = replace(PLAN, when=Trigger(Moment.TOKENS, 2), survivors=0, bystanders=0, later=2, known=0, request_timeout_ns=5 * S)
    async with server:
        target = make_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", watch=["my_busy_slots"])
        result = await run_storm(target, plan)
    assert result.kind == "unknown"
    found = {one.name: one for one in find(result)}
    assert f"my_busy_slots is {PLAN.victims}" in found["slot_leak"].evidence[0]


async def _left_early(writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> bool:
    """Twenty words; whether the client left before the end."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    for word in range(20):
        reason = '"length"' if word == 19 else "null"
        writer.write(b'data: {"choices": [{"index": 0, "text": " w%d", "finish_reason": %s}]}\n\n' % (word, reason.encode()))
        await asyncio.sleep(0.005)
        if reader.at_eof() or writer.transport.is_closing():
            return True
    writer.write(b"data: [DONE]\n\n")
    return False
