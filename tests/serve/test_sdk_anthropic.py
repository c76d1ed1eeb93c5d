"""The real Anthropic SDK against a live server: messages whole, streamed, with tools; counting; errors."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, live

anthropic: Any = None


@pytest.fixture(scope="module", autouse=True)
def _sdk() -> None:
    """Every worker reads all files of tests, and only one of them needs what takes a second to import."""
    global anthropic
    anthropic = pytest.importorskip("anthropic")


MODEL = "wt-model"
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather",
    "input_schema": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
HELLO = [{"role": "user", "content": "hello [wt:5]"}]


def client_of(server: LiveServer) -> "anthropic.AsyncAnthropic":
    return anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=PATIENCE_S)


async def assert_clean(server: LiveServer) -> None:
    await server.until(lambda: not server.server.engine.live() and not len(server.server.jobs))
    server.server.engine.check_integrity()


async def read_kinds(stream: AsyncIterator[Any], seen: list[str]) -> None:
    async for event in stream:
        seen.append(event.type)


async def test_a_whole_message() -> None:
    async with live() as server, client_of(server) as client:
        answer = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=12, system="Be brief.")
        assert answer.stop_reason == "max_tokens" and answer.content[0].type == "text" and answer.content[0].text
        assert answer.usage.output_tokens == 12
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
        assert counted.input_tokens == answer.usage.input_tokens


async def test_the_streaming_helper_says_what_the_whole_message_says() -> None:
    async with live() as server, client_of(server) as client:
        async with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=12) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
        whole = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=12)
        assert final.content[0].text == text == whole.content[0].text != ""
        assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
        await assert_clean(server)


async def test_a_stop_sequence_is_named() -> None:
    async with live() as server, client_of(server) as client:
        whole = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=12)
        stop = whole.content[0].text.split()[3]
        answer = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=12, stop_sequences=[stop])
        assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop


async def test_a_forced_tool_call_streamed_and_answered() -> None:
    async with live(**HERMES) as server, client_of(server) as client:
        options = {"model": MODEL, "max_tokens": 500, "tools": [WEATHER]}
        async with client.messages.stream(messages=HELLO, tool_choice={"type": "any"}, **options) as stream:
            final = await stream.get_final_message()
        (call,) = final.content
        assert final.stop_reason == "tool_use" and call.type == "tool_use" and list(call.input) == ["location"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 C"}
        turns = [*HELLO, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        after = await client.messages.create(messages=turns, tool_choice={"type": "none"}, **options | {"max_tokens": 5})
        assert after.content[0].type == "text"
        await assert_clean(server)


async def test_thinking_comes_as_a_signed_block() -> None:
    async with live(reasoning_parser="qwen3") as server, client_of(server) as client:
        async with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=10) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking"]
        assert final.content[0].thinking and len(final.content[0].signature) == 32


async def test_cached_tokens_are_not_input_tokens() -> None:
    async with live(enable_prompt_tokens_details=True, scheduler__block_size=16) as server, client_of(server) as client:
        long = [{"role": "user", "content": "one two three four five six seven eight nine ten " * 8}]
        first = (await client.messages.create(model=MODEL, messages=long, max_tokens=1)).usage
        second = (await client.messages.create(model=MODEL, messages=long, max_tokens=1)).usage
        assert first.cache_read_input_tokens == 0 and first.cache_creation_input_tokens
        assert second.cache_creation_input_tokens == 0 and second.cache_read_input_tokens == first.cache_creation_input_tokens
        assert first.input_tokens == second.input_tokens < 16


async def test_errors_have_two_envelopes() -> None:
    async with live() as server, client_of(server) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="claude-x", messages=HELLO, max_tokens=5)
        assert unknown.value.body["error"]["type"] == "not_found_error" and unknown.value.body["type"] == "error"
        with pytest.raises(anthropic.BadRequestError) as invalid:
            await client.messages.create(model=MODEL, messages=HELLO, max_tokens=0)
        assert invalid.value.body["error"]["type"] == "Bad Request" and "type" not in invalid.value.body


async def test_an_error_in_mid_stream_closes_the_block_and_ends_without_message_stop() -> None:
    from windtunnel.wire.family import WireError

    async with live(pacing__itl_ns=FOREVER_NS) as server, client_of(server) as client:
        stream = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=50, stream=True)
        await server.until(lambda: server.states() == ["decode"])
        server.server.jobs.fail_all(WireError("EngineCore encountered an issue", 500, "InternalServerError"))
        seen: list[str] = []
        with pytest.raises(anthropic.APIStatusError, match="EngineCore"):
            await read_kinds(stream, seen)
        assert seen[-1] == "content_block_stop" and "message_stop" not in seen
        await assert_clean(server)


async def test_an_operators_abort_has_no_stop_reason() -> None:
    async with live(pacing__itl_ns=FOREVER_NS) as server, client_of(server) as client:
        stream = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=50, stream=True)
        await server.until(lambda: server.states() == ["decode"])
        server.server.jobs.abort_all()
        events = [event async for event in stream]
        assert [event.type for event in events][-2:] == ["message_delta", "message_stop"]
        assert events[-2].delta.stop_reason is None


async def test_leaving_in_mid_stream_leaves_nothing_behind() -> None:
    async with live(pacing__itl_ns=FOREVER_NS) as server, client_of(server) as client:
        stream = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=50, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        await assert_clean(server)
