"""How ends are classified, on a socket that sends exactly what a test says."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from windtunnel.core.units import MS, S
from windtunnel.lab.client import run_request
from windtunnel.lab.connection import How, parse_origin
from windtunnel.lab.leave import Leave
from windtunnel.lab.plan import Api, Moment, Role, Trigger
from windtunnel.lab.record import Ask, End, StreamRecord
from windtunnel.lab.session import Session
from windtunnel.lab.target import Target, make_target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices": [{"index": 0, "text": " acorn", "finish_reason": null}]}\n\n'
FINISH = b'data: {"choices": [{"index": 0, "text": " actor", "finish_reason": "length"}]}\n\n'
ERROR = b'data: {"error": {"message": "no", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunked(*frames: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in frames)


def plain(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@asynccontextmanager
async def sends(answer: bytes | None) -> AsyncIterator[Target]:
    """A server that answers every request with these bytes and closes; None: it never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
            await reader.read(65_536)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield make_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "fake")


async def ask_once(answer: bytes | None, *, stream: bool = True, timeout_ns: int = 5 * S) -> StreamRecord:
    async with sends(answer) as target:
        return await run_request(Session(target, timeout_ns, 0), Ask(1, Role.LATER, 0, Api.COMPLETIONS, "[wt:1]", 2, stream))


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (HEAD + chunked(TEXT, FINISH, DONE) + END, End.FINISHED),
        (HEAD + chunked(TEXT + FINISH[:20], FINISH[20:] + DONE) + END, End.FINISHED),
        (HEAD + chunked(*(part.replace(b"\n", b"\r\n") for part in (TEXT, FINISH, DONE))) + END, End.FINISHED),
        (HEAD + chunked(b": keep-alive\n\n", TEXT, FINISH, DONE) + END, End.FINISHED),
        (HEAD + chunked(TEXT, FINISH) + END, End.UNTERMINATED),
        (HEAD + chunked(TEXT, DONE) + END, End.UNTERMINATED),
        (HEAD + chunked(TEXT, b"data: {") + END, End.UNTERMINATED),
        (HEAD + chunked(TEXT, FINISH, DONE), End.CUT),
        (HEAD + chunked(TEXT), End.CUT),
        (HEAD[:30], End.CUT),
        (b"", End.CUT),
        (HEAD + chunked(TEXT, ERROR, DONE) + END, End.ERROR_FRAME),
        (HEAD + chunked(b"data: nonsense\n\n") + END, End.MALFORMED),
        (HEAD + b"zz\r\n", End.MALFORMED),
        (b"SSH-2.0-nonsense\r\n\r\n", End.MALFORMED),
        (plain(503, b"{}"), End.ERROR_STATUS),
        (HEAD.replace(b"200", b"500") + chunked(TEXT, FINISH, DONE) + END, End.ERROR_STATUS),
    ],
)
async def test_end_of_a_stream(answer: bytes, end: End) -> None:
    record = await ask_once(answer)
    assert record.end is end, record.error
    assert (record.error is None) == (end is End.FINISHED)


async def test_words_and_times_of_a_finished_stream() -> None:
    record = await ask_once(HEAD + chunked(TEXT, FINISH, DONE) + END)
    assert record.words == ("acorn", "actor")
    assert record.finish_reason == "length"
    assert record.status == 200
    assert record.head_ns is not None
    assert record.started_ns <= record.head_ns <= record.frame_ns[0] <= record.frame_ns[1] <= record.ended_ns


async def test_whole_answer() -> None:
    record = await ask_once(plain(200, b'{"choices": [{"text": " acorn actor", "finish_reason": "length"}]}'), stream=False)
    assert record.end is End.FINISHED
    assert record.words == ("acorn", "actor")


async def test_silence_is_a_timeout() -> None:
    assert (await ask_once(None, timeout_ns=50 * MS)).end is End.TIMEOUT


async def test_nobody_there_is_refused(deaf_port: int) -> None:
    target = make_target(f"http://127.0.0.1:{deaf_port}", "fake")
    record = await run_request(Session(target, 60 * S, 0), Ask(1, Role.LATER, 0, Api.CHAT, "[wt:1]", 2, True))
    assert record.end is End.REFUSED


async def ending_of(how: How) -> tuple[str, StreamRecord]:
    """How the server saw its client leave after the first word, and what the client still read."""
    seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunked(TEXT))
        try:
            while await reader.read(65_536):
                pass
            seen.set_result("end of stream")
        except ConnectionResetError:
            seen.set_result("reset")
        writer.write(chunked(FINISH, DONE) + END)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        target = make_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "fake")
        ask = Ask(1, Role.VICTIM, 0, Api.COMPLETIONS, "[wt:1]", 2, True)
        record = await run_request(Session(target, 5 * S, 5 * S), ask, Leave(how, Trigger(Moment.TOKENS, 1)))
        return await seen, record


@pytest.mark.parametrize(
    ("how", "seen", "words_after"),
    [(How.FIN, "end of stream", 0), (How.RST, "reset", 0), (How.HALF_CLOSE, "end of stream", 1)],
)
async def test_each_way_of_leaving_is_that_way_on_the_wire(how: How, seen: str, words_after: int) -> None:
    ending, record = await ending_of(how)
    assert ending == seen
    assert (record.end, record.left_in, record.words_after_leaving) == (End.LEFT, "tokens:1", words_after)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://api.example/v1", "https://api.example:443/v1"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_base_urls(url: str, expected: str) -> None:
    assert parse_origin(url).url == expected


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h/?q=1", "http://user@h/"])
def test_bad_base_urls_are_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ValueError, match="base URL"):
        parse_origin(url)


@pytest.mark.parametrize("url", ["http://[::1", "grpcs://127.0.0.1:99999", "http://h:x"])
def test_what_no_parser_takes_is_told_with_the_right_form(url: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(url))} is not a base URL: write http://HOST:PORT"):
        parse_origin(url)


def test_a_base_that_ends_in_v1_is_not_doubled() -> None:
    target = make_target("http://127.0.0.1:1/v1", "m")
    assert target.origin.prefix + target.path(Api.CHAT) == "/v1/chat/completions"
    assert target.metrics[0].origin.prefix + target.metrics[0].path == "/metrics"
