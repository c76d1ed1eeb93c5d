"""Long prompts are read off the event loop: others are served meanwhile, and nothing about the answer differs."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, RawClient, live, request_bytes
from tests.serve.test_operations import call

from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.serve import generate, planning
from windtunnel.serve.planning import OFF_LOOP_BYTES
from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import WireError
from windtunnel.wire.http import parse_json
from windtunnel.wire.vllm import completions, fields

LONG = {"scheduler__max_model_len": 65536, "scheduler__num_gpu_blocks": 8192, "enable_prompt_tokens_details": True}
TEXT = " ".join(f"word {number}" for number in range(6000))
BODY = {"model": "wt-model", "prompt": TEXT, "max_tokens": 8, "ignore_eos": True}
SMALL = BODY | {"prompt": "short [wt:1]"}
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, whoever tokenises a long text waits."""
    gate = threading.Event()
    encode = BuiltinTokenizer.encode

    def waiting(self: BuiltinTokenizer, text: str, **options: Any) -> list[int]:
        if len(text) > OFF_LOOP_BYTES:
            assert threading.current_thread() is not threading.main_thread(), "a long text is tokenised on the loop"
            assert gate.wait(PATIENCE_S)
        return encode(self, text, **options)

    monkeypatch.setattr(BuiltinTokenizer, "encode", waiting)
    yield gate
    gate.set()


async def start(server: LiveServer, path: str, body: dict[str, Any]) -> RawClient:
    client = await RawClient.connect(server.port)
    client.send(request_bytes(path, body, extra="Connection: close\r\n"))
    return client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"model": "wt-model", "messages": MESSAGES, "max_tokens": 8}),
        ("/v1/messages", {"model": "wt-model", "messages": MESSAGES, "max_tokens": 8}),
        ("/v1/responses", {"model": "wt-model", "input": TEXT, "max_output_tokens": 8}),
        ("/tokenize", {"model": "wt-model", "prompt": TEXT}),
        ("/v1/messages/count_tokens", {"model": "wt-model", "messages": MESSAGES}),
    ],
    ids=["completions", "chat", "messages", "responses", "tokenize", "count_tokens"],
)
async def test_others_are_served_while_a_long_prompt_is_read(held: threading.Event, path: str, body: dict[str, Any]) -> None:
    async with live(**LONG) as server:
        client = await start(server, path, body)
        await server.until(lambda: server.server.planner.off_loop == 1)
        assert (await call(server, "POST", "/v1/completions", SMALL))[0] == 200
        assert server.states() == []
        held.set()
        assert (await client.read_all()).startswith(b"HTTP/1.1 200")


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(held: threading.Event) -> None:
    async with live(**LONG, pacing__itl_ns=FOREVER_NS) as server:
        client = await start(server, "/v1/completions", BODY | {"stream": True})
        await server.until(lambda: server.server.planner.off_loop == 1)
        client.leave("rst")
        (connection,) = server.process.server_state.connections
        await server.until(lambda: connection not in server.process.server_state.connections)
        held.set()
        await server.until(lambda: server.server.load == 0 and not server.server.jobs and not server.states())
        server.server.engine.check_integrity()
        assert list(server.server.metrics.live()) == []


async def answer(body: dict[str, Any], **values: Any) -> tuple[Any, Any, frozenset[bytes]]:
    """The first answer's choices, the second one's usage, and the cache afterwards."""
    async with live(**LONG | values) as server:
        _status, first = await call(server, "POST", "/v1/completions", body)
        _status, second = await call(server, "POST", "/v1/completions", body)
        server.server.engine.check_integrity()
        return first["choices"], second["usage"], server.server.engine.cached_hashes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_salt": "s"},
        {"prompt": BuiltinTokenizer().encode(TEXT)},
        {"prompt": [TEXT, TEXT + " more"]},
        {"n": 2, "temperature": 1.0},
    ],
    ids=["text", "salt", "token ids", "two prompts", "two choices"],
)
async def test_the_answer_and_the_cache_are_the_same_as_on_the_loop(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    off_loop = await answer(BODY | changes)
    monkeypatch.setattr(planning, "OFF_LOOP_BYTES", 1 << 40)
    monkeypatch.setattr(generate, "OFF_LOOP_BYTES", 1 << 40)
    assert await answer(BODY | changes) == off_loop
    assert off_loop[1]["prompt_tokens_details"]["cached_tokens"] > 5000


async def test_refusals_of_long_bodies_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(body: bytes) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "a long body is read on the loop"
        return parse_json(body)

    monkeypatch.setattr(http, "parse_json", read)
    monkeypatch.setattr(generate, "parse_json", read)
    async with live(scheduler__max_model_len=1024) as server:
        status, error = await call(server, "POST", "/v1/completions", BODY)
        assert (status, error["error"]["param"]) == (400, "input_text")
        status, error = await call(server, "POST", "/v1/completions", BODY | {"max_tokens": "many"})
        assert (status, error["error"]["param"]) == (400, "body.max_tokens")
        assert server.server.planner.off_loop == 3, "one is read again for what its prefill holds"


async def test_without_prefix_caching_no_hashes_are_made() -> None:
    async with live(**LONG, scheduler__enable_prefix_caching=False) as server:
        assert (await call(server, "POST", "/v1/completions", BODY))[0] == 200
        assert server.server.engine.cached_hashes == frozenset()


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "-Infinity",
        "1e400",
        '"\\ud800"',
        '{"a": 1, "a": 2}',
        "123456789012345678901234567890",
        "-0.0",
        "1E5",
        "0.12345678901234567890",
    ],
)
def test_large_json_is_read_as_small_json(text: str) -> None:
    padding = " " * (1 << 17)
    assert repr(parse_json(f'{{"a": [{text}]{padding}}}'.encode())) == repr(json.loads(f'{{"a": [{text}]}}'))
    numbers = ", ".join(map(str, range(40000)))
    long_list = f'{{"a": [{numbers}, {text}, {numbers}]}}'
    assert repr(parse_json(long_list.encode())) == repr(json.loads(long_list))


@pytest.mark.parametrize("text", ["[1, 2", '{"a" 1}', "[1]]"])
def test_errors_in_large_json_are_those_of_small_json(text: str) -> None:
    with pytest.raises(WireError) as small:
        parse_json(text.encode())
    with pytest.raises(WireError) as large:
        parse_json((text + " " * (1 << 17)).encode())
    assert large.value.message.splitlines()[0] == small.value.message.splitlines()[0]
    if text != "[1, 2":
        assert large.value == small.value


async def test_the_planner_gives_errors_back() -> None:
    planner = planning.Planner(asyncio.get_running_loop())

    def fail() -> None:
        raise WireError("no")

    with pytest.raises(WireError, match="no"):
        await planner.run(1 << 20, fail)
    planner.close()


@pytest.mark.parametrize("odd", ["-1", "1.5", '"x"', "[1]", "2,,3", "4 5"])
def test_an_odd_member_of_a_long_token_list_is_refused_as_ever(odd: str) -> None:
    """In the first part and in a later one."""
    env = ServerEnv(("m",), BuiltinTokenizer(), 1 << 20, lambda: "0" * 16, lambda: 0)
    ids = ["5"] * 30000
    for place in (0, 30000):
        told = []
        for large in (1 << 16, 1 << 40):
            body = f'{{"model": "m", "prompt": [{", ".join([*ids[:place], odd, *ids[place:]])}]}}'.encode()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(http, "_LARGE_BODY_BYTES", large)
                patch.setattr(fields, "_TOKENS_AT_ONCE", 4096 if large == 1 << 16 else 1 << 40)
                with pytest.raises(WireError) as refused:
                    completions.plan(body, {"content-type": "application/json"}, env)
            told.append(refused.value)
        assert told[0] == told[1]
