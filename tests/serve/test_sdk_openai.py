"""The real OpenAI SDK against a live server: `/v1/responses` whole, streamed, with tools and with a schema."""

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, live

openai: Any = None


@pytest.fixture(scope="module", autouse=True)
def _sdk() -> None:
    """Every worker reads all files of tests, and only one of them needs what takes a second to import."""
    global openai
    openai = pytest.importorskip("openai")


HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
STORE = {"enable_responses_store": True}
MODEL = "wt-model"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]}},
        "required": ["location", "unit"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Weather(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int


def client_of(server: LiveServer) -> "openai.AsyncOpenAI":
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)


async def assert_clean(server: LiveServer) -> None:
    await server.until(lambda: not server.server.engine.live() and not len(server.server.jobs))
    server.server.engine.check_integrity()


async def read_kinds(stream: AsyncIterator[Any], seen: list[str]) -> None:
    async for event in stream:
        seen.append(event.type)


async def test_a_whole_response() -> None:
    async with live() as server, client_of(server) as client:
        answer = await client.responses.create(
            model=MODEL, input="hello [wt:5]", max_output_tokens=12, instructions="Be brief."
        )
        assert answer.status == "incomplete"
        assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output_text and answer.instructions == "Be brief."
        assert answer.usage and answer.usage.output_tokens == 12
        await assert_clean(server)


async def test_the_streaming_helper_ends_with_what_the_deltas_said() -> None:
    async with live(generation__natural_length=(12, 12)) as server, client_of(server) as client:
        said = ""
        async with client.responses.stream(model=MODEL, input="hello [wt:5]") as stream:
            numbers = []
            async for event in stream:
                numbers.append(event.sequence_number)
                if event.type == "response.output_text.delta":
                    said += event.delta
            final = await stream.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert final.output_text == said != ""
        await assert_clean(server)


async def test_a_required_tool_call_streamed_and_answered() -> None:
    async with live(**HERMES) as server, client_of(server) as client:
        options = {"model": MODEL, "tools": [WEATHER], "tool_choice": "required"}
        async with client.responses.stream(input="weather [wt:9]", max_output_tokens=500, **options) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        (call,) = final.output
        assert call.type == "function_call" and call.name == "get_weather"
        assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds
        assert set(call.parsed_arguments or {}) == {"location", "unit"}
        items = [
            {"role": "user", "content": "weather [wt:9]"},
            call.model_dump(include={"type", "call_id", "name", "arguments"}),
            {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"},
        ]
        after = await client.responses.create(model=MODEL, input=items, max_output_tokens=5)
        assert after.output_text
        await assert_clean(server)


async def test_structured_outputs_are_parsed() -> None:
    async with live() as server, client_of(server) as client:
        parsed = await client.responses.parse(model=MODEL, input="weather [wt:3]", text_format=Weather, max_output_tokens=500)
        assert isinstance(parsed.output_parsed, Weather)


async def test_reasoning_comes_as_an_item_of_its_own() -> None:
    async with live(reasoning_parser="qwen3") as server, client_of(server) as client:
        answer = await client.responses.create(model=MODEL, input="think [wt:4]", max_output_tokens=10)
        assert [item.type for item in answer.output] == ["reasoning"]
        assert answer.usage and answer.usage.output_tokens_details.reasoning_tokens == 10


async def test_store_background_retrieve_continue_and_cancel() -> None:
    async with live(**STORE) as server, client_of(server) as client:
        kept = await client.responses.create(model=MODEL, input="first [wt:6]", max_output_tokens=5)
        assert (await client.responses.retrieve(kept.id)).output_text == kept.output_text
        more = await client.responses.create(model=MODEL, input="second", previous_response_id=kept.id, max_output_tokens=5)
        assert more.usage and kept.usage and more.usage.input_tokens > kept.usage.input_tokens + kept.usage.output_tokens
        queued = await client.responses.create(model=MODEL, input="third [wt:7]", max_output_tokens=5, background=True)
        assert queued.status == "queued"
        done = await client.responses.retrieve(queued.id, stream=True, starting_after=1)
        events = [event async for event in done]
        assert events[0].sequence_number == 2 and events[-1].type == "response.incomplete"
        assert (await client.responses.retrieve(queued.id)).status == "incomplete"
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await client.responses.cancel(kept.id)
        await assert_clean(server)


async def test_a_cancelled_background_run_frees_the_engine_and_stays_cancelled() -> None:
    async with live(**STORE, pacing__itl_ns=FOREVER_NS) as server, client_of(server) as client:
        queued = await client.responses.create(model=MODEL, input="run [wt:7]", max_output_tokens=50, background=True)
        await server.until(lambda: server.states() == ["decode"])
        assert (await client.responses.cancel(queued.id)).status == "cancelled"
        await assert_clean(server)
        assert (await client.responses.retrieve(queued.id)).status == "cancelled"


async def test_without_a_store_ids_are_unknown() -> None:
    async with live() as server, client_of(server) as client:
        kept = await client.responses.create(model=MODEL, input="first [wt:6]", max_output_tokens=5)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept.id)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model=MODEL, input="x", background=True)


async def test_a_failure_after_the_head_cuts_the_stream() -> None:
    async with live() as server, client_of(server) as client:
        stream = await client.responses.create(
            model=MODEL, input="cut [wt:8]", stream=True, extra_body={"stop_token_ids": [10**9]}, max_output_tokens=5
        )
        seen: list[str] = []
        with pytest.raises(openai.APIConnectionError):
            await read_kinds(stream, seen)
        assert seen == ["response.created", "response.in_progress"]
        await assert_clean(server)


async def test_an_operators_abort_looks_like_success() -> None:
    async with live(pacing__itl_ns=FOREVER_NS) as server, client_of(server) as client:
        stream = await client.responses.create(model=MODEL, input="abort [wt:8]", stream=True, max_output_tokens=50)
        await server.until(lambda: server.states() == ["decode"])
        server.server.jobs.abort_all()
        events = [event async for event in stream]
        assert events[-1].type == "response.completed" and events[-1].response.status == "completed"


async def test_leaving_in_mid_stream_leaves_nothing_behind() -> None:
    async with live(pacing__itl_ns=FOREVER_NS) as server, client_of(server) as client:
        stream = await client.responses.create(model=MODEL, input="leave [wt:8]", stream=True, max_output_tokens=50)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await assert_clean(server)


async def test_langchain_streams_over_the_responses_api() -> None:
    chat = pytest.importorskip("langchain_openai")
    async with live() as server:
        model = chat.ChatOpenAI(
            model=MODEL, base_url=f"{server.url}/v1", api_key="unused", use_responses_api=True, max_tokens=12, max_retries=0
        )
        parts = [part async for part in model.astream("hello [wt:5]")]
        whole = await model.ainvoke("hello [wt:5]")
        assert "".join(part.text for part in parts) == whole.text != ""
        await assert_clean(server)
