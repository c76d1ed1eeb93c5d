"""Routes beside the four streaming families: pooling models, documents, scoring, rendering."""

import asyncio
import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conformance.cases import golden_folder
from tests.own_time import own_time
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, RawClient, live, request_bytes

GOLDEN = golden_folder()
POOLING = {"runner": "pooling"}
CLASSIFY = {"runner": "pooling", "convert": "classify", "num_labels": 3}


def client_of(server: LiveServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S)


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json={"model": "wt-model"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.skipif(GOLDEN is None, reason="no recordings: WINDTUNNEL_GOLDEN does not hold vllm/openapi.json")
async def test_the_openapi_document_has_the_recorded_operations() -> None:
    assert isinstance(GOLDEN, Path)
    recorded = json.loads((GOLDEN / "openapi.json").read_text())
    async with live() as server, client_of(server) as client:
        ours = (await client.get("/openapi.json")).json()
    assert list(ours["paths"]) == list(recorded["paths"])
    for path, operations in recorded["paths"].items():
        assert {key: value["operationId"] for key, value in ours["paths"][path].items()} == {
            key: value["operationId"] for key, value in operations.items()
        }


async def test_documents_can_be_switched_off() -> None:
    async with live(disable_fastapi_docs=True) as server, client_of(server) as client:
        for path in ("/openapi.json", "/docs", "/redoc"):
            assert (await client.get(path)).status_code == 404


async def test_a_generation_model_has_no_pooling_routes_and_the_other_way_round() -> None:
    async with live() as server, client_of(server) as client:
        for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"):
            assert (await client.post(path, json={})).json() == {"detail": "Not Found"}
    async with live(**POOLING) as server, client_of(server) as client:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/classify", "/v1/messages/count_tokens"):
            assert (await client.post(path, json={})).json() == {"detail": "Not Found"}


async def test_embeddings_are_unit_vectors_of_their_tokens() -> None:
    async with live(**POOLING) as server, client_of(server) as client:
        answer = await post(client, "/v1/embeddings", input=["the cat", "the cat", "a dog"])
        vectors = [entry["embedding"] for entry in answer["data"]]
        assert [len(vector) for vector in vectors] == [384] * 3
        assert all(math.isclose(sum(value**2 for value in vector), 1) for vector in vectors)
        assert vectors[0] == vectors[1] != vectors[2]
        assert (
            answer["usage"]["completion_tokens"] == 0
            and answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
        )
        packed = await post(client, "/v1/embeddings", input="the cat", encoding_format="base64")
        floats = struct.unpack("<384f", base64.b64decode(packed["data"][0]["embedding"]))
        assert all(math.isclose(one, other, abs_tol=1e-6) for one, other in zip(floats, vectors[0], strict=True))
        short = (await post(client, "/v1/embeddings", input="the cat", dimensions=8))["data"][0]["embedding"]
        assert len(short) == 8 and math.isclose(sum(value**2 for value in short), 1)
        refused = await client.post("/v1/embeddings", json={"input": "x", "dimensions": 385})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "dimensions"


async def test_the_openai_sdk_reads_embeddings() -> None:
    openai = pytest.importorskip("openai")
    async with (
        live(**POOLING) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        answer = await client.embeddings.create(model="wt-model", input=["one", "two"])
        assert [entry.index for entry in answer.data] == [0, 1] and len(answer.data[0].embedding) == 384


async def test_scores_and_reranking_prefer_shared_words() -> None:
    async with live(**POOLING) as server, client_of(server) as client:
        documents = ["a quiet street", "the cat sat", "the cat sat on the mat"]
        scores = [row["score"] for row in (await post(client, "/score", text_1="the cat sat", text_2=documents))["data"]]
        assert max(scores) == scores[1] and math.isclose(scores[1], 1)
        ranked = await post(client, "/v1/rerank", query="the cat sat", documents=documents, top_n=2)
        assert [row["index"] for row in ranked["results"]] == [1, 2]
        uneven = await client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
        assert uneven.status_code == 400


async def test_a_classifier_gives_probabilities() -> None:
    async with live(**CLASSIFY) as server, client_of(server) as client:
        (entry,) = (await post(client, "/classify", input="the cat"))["data"]
        assert entry["num_classes"] == len(entry["probs"]) == 3 and math.isclose(sum(entry["probs"]), 1)
        assert entry["label"] == f"LABEL_{entry['probs'].index(max(entry['probs']))}"
        assert (await post(client, "/pooling", input="the cat"))["data"][0]["data"] == entry["probs"]
        assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 404


async def test_pooling_answers_have_the_shapes_of_vllm_0_33() -> None:
    """Ids, usage and refusals as `vllm/entrypoints/pooling` has them (0.33.0)."""
    usage = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"}
    told = {"headers": {"x-request-id": "r"}}
    async with live(**POOLING) as server, client_of(server) as client:
        pooled = (await client.post("/pooling", json={"input": "x"}, **told)).json()
        assert (pooled["id"], set(pooled["usage"])) == ("pooling-r", usage)
        ranked = (await client.post("/rerank", json={"query": "x", "documents": "y"}, **told)).json()
        assert (ranked["id"], set(ranked["usage"])) == ("score-r", {"prompt_tokens", "total_tokens"})
        (row,) = (await client.post("/score", json={"data_1": "x", "data_2": ["x"]}, **told)).json()["data"]
        assert math.isclose(row["score"], 1)
        refusals: list[tuple[str, dict[str, object], str, str | None]] = [
            ("/pooling", {"input": "x", "dimensions": 8}, "dimensions is currently not supported", "dimensions"),
            ("/pooling", {"input": "x", "task": "classify"}, "Unsupported task: 'classify'", "task"),
            ("/pooling", {"input": "x", "task": "encode"}, "`encode` task was removed", "task"),
            ("/v1/embeddings", {"input": "x", "normalize": True}, "Parameter `normalize` was removed", "normalize"),
            ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "Input lengths must be either 1:1, 1:N or N:N", None),
            ("/score", {"text_1": "a", "text_2": []}, "At least one text_pair element must be given", None),
        ]
        for path, body, message, parameter in refusals:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, path
            assert message in answer.json()["error"]["message"] and answer.json()["error"]["param"] == parameter


async def test_only_a_classifier_of_one_class_scores() -> None:
    """vLLM 0.33, `enable_scoring_api`."""
    async with live(**CLASSIFY) as server, client_of(server) as client:
        assert (await client.post("/score", json={"text_1": "a", "text_2": "b"})).status_code == 404
        assert (await client.post("/rerank", json={"query": "a", "documents": ["b"]})).status_code == 404
    async with live(**CLASSIFY | {"num_labels": 1}) as server, client_of(server) as client:
        assert (await client.post("/score", json={"text_1": "a", "text_2": "b"})).status_code == 200


async def test_a_prompt_as_long_as_the_context_is_pooled_and_a_longer_one_refused() -> None:
    async with live(**POOLING, scheduler__max_model_len=64) as server, client_of(server) as client:
        assert (await post(client, "/pooling", input=[7] * 64))["usage"]["prompt_tokens"] == 64
        refused = await client.post("/pooling", json={"input": [7] * 65})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "input_tokens"
        server.server.engine.check_integrity()


async def test_pooling_requests_queue_in_the_engine_and_leave_it_with_their_client() -> None:
    async with live(**POOLING, pacing__ttft_ns=FOREVER_NS) as server:
        client = await RawClient.connect(server.port)
        client.send(request_bytes("/v1/embeddings", {"input": ["one", "two"]}))
        await server.until(lambda: server.states() == ["prefill", "prefill"])
        client.leave("rst")
        await server.until(lambda: not server.states() and not len(server.server.jobs))
        server.server.engine.check_integrity()


async def test_what_render_gives_is_what_generate_takes() -> None:
    async with live(enable_scale_out=True) as server, client_of(server) as client:
        said = {"messages": [{"role": "user", "content": "hello [wt:5]"}], "max_tokens": 5}
        rendered = await post(client, "/v1/messages/render", **said)
        assert rendered["token_ids"] == (await post(client, "/v1/chat/completions/render", **said))["token_ids"]
        tokens = (await post(client, "/inference/v1/generate", **rendered))["choices"][0]["token_ids"]
        assert len(tokens) == 5
        chat = await post(client, "/v1/chat/completions", **said, return_token_ids=True)
        assert chat["choices"][0]["token_ids"] == tokens


async def test_generative_scores_are_probabilities() -> None:
    async with live() as server, client_of(server) as client:
        answer = await post(client, "/generative_scoring", query="good?", items=["yes", "no"], label_token_ids=[44, 45])
        assert all(0 < row["score"] < 1 for row in answer["data"]) and answer["usage"]["completion_tokens"] == 2
        outside = await client.post("/generative_scoring", json={"query": "q", "items": ["a"], "label_token_ids": [10**7]})
        assert outside.status_code == 400


async def test_structured_decisions_are_not_implemented_by_a_language_model() -> None:
    async with live() as server, client_of(server) as client:
        for path in ("/v1/systemone", "/v1/decisions"):
            answer = await client.post(path, json={"state": {}, "questions": {}})
            assert answer.status_code == 501 and answer.json()["error"]["type"] == "NotImplementedError"


async def test_keep_alive_comments_are_for_chat_and_completions_only() -> None:
    bodies = {
        "/v1/responses": {"input": "hi [wt:5]", "max_output_tokens": 5},
        "/v1/messages": {"model": "wt-model", "messages": [{"role": "user", "content": "hi [wt:5]"}], "max_tokens": 5},
    }
    with own_time(asyncio.get_running_loop()):
        async with live(pacing__itl_ns=20_000_000, sse_keep_alive_interval_ns=1_000_000) as server, client_of(server) as client:
            for path, body in bodies.items():
                assert ": keep-alive" not in (await client.post(path, json=body | {"stream": True})).text
            chat = {"messages": [{"role": "user", "content": "hi [wt:5]"}], "max_tokens": 5, "stream": True}
            assert ": keep-alive" in (await client.post("/v1/chat/completions", json=chat)).text


async def test_derender_gives_what_the_api_itself_would_have_said() -> None:
    """vLLM 0.33: render, generate and derender are the API in three steps."""
    said = {"messages": [{"role": "user", "content": "hello [wt:5]"}], "max_tokens": 5, "return_token_ids": True}
    async with live(enable_scale_out=True) as server, client_of(server) as client:
        rendered = await post(client, "/v1/chat/completions/render", **said)
        generated = await post(client, "/inference/v1/generate", **rendered)
        ids = rendered["token_ids"]
        asked = {"generate_response": generated, "prompt_tokens": len(ids), "prompt_token_ids": ids, "chat_request": said}
        back = await post(client, "/v1/chat/completions/derender", **asked)
        direct = await post(client, "/v1/chat/completions", **said)
        assert back["id"] == generated["request_id"]
        changing = ("id", "created", "system_fingerprint")
        assert {k: v for k, v in back.items() if k not in changing} == {k: v for k, v in direct.items() if k not in changing}


async def test_a_stream_is_derendered_event_by_event() -> None:
    """vLLM 0.33: one call for each event, and the client carries the state."""
    said = {"messages": [{"role": "user", "content": "hello [wt:5]"}], "max_tokens": 5}
    async with live(enable_scale_out=True) as server, client_of(server) as client:
        rendered = await post(client, "/v1/chat/completions/render", **said)
        streamed = (await client.post("/inference/v1/generate", json=rendered | {"stream": True})).text
        state, text, finish = None, "", None
        for line in streamed.split("\n\n"):
            if not line.startswith("data: {"):
                continue
            asked = {"stream": True, "generate_chunk": json.loads(line[6:]), "stream_state": state, "chat_request": said}
            told = await post(client, "/v1/chat/completions/derender", **asked, prompt_token_ids=rendered["token_ids"])
            state = told["stream_state"]
            for choice in told["chunk"]["choices"]:
                text += choice["delta"]["content"] or ""
                finish = choice["finish_reason"]
        direct = await post(client, "/v1/chat/completions", **said)
        assert (text, finish) == (direct["choices"][0]["message"]["content"], "length")


async def test_completions_are_derendered_prompt_by_prompt() -> None:
    async with live(enable_scale_out=True) as server, client_of(server) as client:
        said: dict[str, Any] = {"prompt": ["one [wt:5]", "two [wt:6]"], "max_tokens": 4, "logprobs": 2}
        rendered = (await client.post("/v1/completions/render", json=said)).json()
        generated = [await post(client, "/inference/v1/generate", **one) for one in rendered]
        counts = [len(one["token_ids"]) for one in rendered]
        asked = {"generate_responses": generated, "prompt_tokens": counts, "completion_request": said}
        back = await post(client, "/v1/completions/derender", **asked)
        direct = await post(client, "/v1/completions", **said)
        assert [one["text"] for one in back["choices"]] == [one["text"] for one in direct["choices"]]
        assert [one["logprobs"]["tokens"] for one in back["choices"]] == [
            one["logprobs"]["tokens"] for one in direct["choices"]
        ]
        assert back["usage"] == direct["usage"]


async def test_what_ended_an_answer_is_not_in_its_derendered_text() -> None:
    async with live(enable_scale_out=True) as server, client_of(server) as client:
        tokenizer = server.server.tokenizer
        ids = tokenizer.encode(" a holly orange", add_special_tokens=False)

        async def text(token_ids: list[int], stop_reason: object = None, finish: str = "stop", **request: object) -> object:
            choice = {"index": 0, "finish_reason": finish, "stop_reason": stop_reason, "token_ids": token_ids}
            asked = {"generate_responses": [{"request_id": "r", "choices": [choice]}]}
            asked |= {"completion_request": {"prompt": "x", **request}} if request else {}
            (told,) = (await post(client, "/v1/completions/derender", **asked))["choices"]
            return told["text"], told["stop_reason"]

        eos = tokenizer.eos_token_id
        assert await text([*ids, eos]) == (" a holly orange", None)
        assert await text(ids, finish="length") == (" a holly orange", None)
        assert await text(ids, stop_reason=ids[-1]) == (" a holly", ids[-1])
        assert await text(ids, stop_token_ids=[ids[-1]]) == (" a holly", ids[-1])
        assert await text(ids, stop_reason=" holly") == (" a", " holly")
        assert await text(ids, stop=[" holly"]) == (" a", " holly")
        assert await text(ids, stop=[" holly"], include_stop_str_in_output=True) == (" a holly", " holly")


@pytest.mark.parametrize(
    ("token", "words"),
    [(-1, "token_ids"), (2**63, "out of vocabulary"), (10**300, "out of vocabulary"), ("x", "token_ids")],
    ids=["negative", "long", "huge", "text"],
)
async def test_a_token_that_is_none_is_a_400(token: object, words: str) -> None:
    answer = {"request_id": "r", "choices": [{"index": 0, "token_ids": [token]}]}
    async with live(enable_scale_out=True) as server, client_of(server) as client:
        told = await client.post("/v1/completions/derender", json={"generate_responses": [answer]})
        assert (told.status_code, words in told.text) == (400, True)


@pytest.mark.parametrize("n", [0, -1])
async def test_no_beams_are_a_400(n: int) -> None:
    async with live() as server, client_of(server) as client:
        body = {"model": "wt-model", "prompt": "x", "use_beam_search": True, "n": n}
        told = await client.post("/v1/completions", json=body)
        assert (told.status_code, f"n must be at least 1, got {n}." in told.text) == (400, True)


async def test_tokens_alone_are_derendered_too() -> None:
    async with live(enable_scale_out=True) as server, client_of(server) as client:
        ids = server.server.tokenizer.encode(" a holly", add_special_tokens=False)
        entry = {"token_id": ids[0], "logprob": -0.5, "top_logprobs": [{"token_id": ids[0], "logprob": -0.5}]}
        choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": [entry]}}
        answer = {"request_id": "r", "choices": [choice], "prompt_token_ids": [5, 6], "kv_transfer_params": {"a": 1}}
        told = await post(client, "/v1/chat/completions/derender", generate_response=answer)
        assert (told["id"], told["kv_transfer_params"], told["usage"]["prompt_tokens"]) == ("r", {"a": 1}, 0)
        assert told["usage"]["completion_tokens"] == len(ids)
        (made,) = told["choices"]
        assert (made["message"]["role"], made["message"]["content"]) == ("assistant", " a holly")
        assert [one["token"] for one in made["logprobs"]["content"][0]["top_logprobs"]] == [
            made["logprobs"]["content"][0]["token"]
        ]
        request = {"completion_request": {"prompt": "x", "return_token_ids": True}}
        (made,) = (await post(client, "/v1/completions/derender", generate_responses=[answer], **request))["choices"]
        assert (made["prompt_token_ids"], made["token_ids"]) == ([5, 6], ids)


async def test_what_cannot_be_derendered_is_refused() -> None:
    choice = {"index": 0, "token_ids": [7, 8]}
    answer = {"request_id": "r", "choices": [choice]}
    strange = {"request_id": "r", "choices": [choice | {"token_ids": [7, 10**9]}]}
    entry = {"token_id": 7, "logprob": -1.0, "top_logprobs": [{"token_id": 2**40, "logprob": -1.0}]}
    told_strangely = {"request_id": "r", "choices": [choice | {"logprobs": {"content": [entry]}}]}
    refusals: list[tuple[str, dict[str, Any], int, str]] = [
        ("completions", {"generate_responses": []}, 400, "must not be empty"),
        ("completions", {"generate_responses": [answer], "prompt_tokens": [1, 2]}, 400, "prompt_tokens length (2) must equal"),
        ("completions", {"generate_responses": [answer | {"output_mode": "text"}]}, 400, "output_mode"),
        ("chat/completions", {"generate_response": {"request_id": "r", "choices": [{"index": 0}]}}, 400, "null token_ids"),
        ("chat/completions", {"generate_response": answer, "model": "none"}, 404, "does not exist"),
        ("completions", {"generate_responses": [strange]}, 400, "out of vocabulary"),
        ("chat/completions", {"generate_response": told_strangely}, 400, "out of vocabulary"),
    ]
    async with live(enable_scale_out=True, scheduler__max_model_len=64) as server, client_of(server) as client:
        for path, body, status, told in refusals:
            refused = await client.post(f"/v1/{path}/derender", json=body)
            assert (refused.status_code, told in refused.json()["error"]["message"]) == (status, True), refused.text
    async with live(enable_scale_out=True, reasoning_parser="qwen3") as server, client_of(server) as client:
        refused = await client.post("/v1/chat/completions/derender", json={"generate_response": answer})
        assert "chat_request is required" in refused.json()["error"]["message"]
    async with live() as server, client_of(server) as client:
        assert (await client.post("/v1/chat/completions/derender", json={"generate_response": answer})).status_code == 403
