"""Arbitrary and almost valid bodies against every POST route: no 5xx, no hang, the server alive and idle afterwards."""

import asyncio
import http.client
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.live import LiveServer, live

from windtunnel.serve.operations import rules
from windtunnel.wire.vllm import families

TIMEOUT_S = 60
DEPTH = int(os.environ.get("WINDTUNNEL_FUZZ_DEPTH", "1"))
"""How many times more examples than in a quick run."""
CONFIG = {
    "dev_mode": True,
    "runtime_lora": True,
    "enable_scale_out": True,
    "profiler_config": "{}",
    "scheduler__max_model_len": 64,
    "scheduler__num_gpu_blocks": 512,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "limits__body_bytes": 100_000,
    "trust_request_chat_template": True,
    "enable_server_load_tracking": True,
}
STATEFUL = {"/pause", "/sleep", "/debug/engine_death", "/debug/engine_freeze"}
"""They read no body, and would change what the other routes answer."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["x"],
    "n": 1,
    "max_tokens": 4,
    "stream": False,
    "ignore_eos": True,
}
VALID: dict[str, Any] = {
    "/v1/completions": SAMPLING
    | {"model": "wt-model", "prompt": ["a", "b"], "echo": True, "logprobs": 1, "stream_options": None},
    "/v1/chat/completions": SAMPLING
    | {
        "model": "wt-model",
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/responses": {"model": "wt-model", "input": "hi", "max_output_tokens": 4, "tools": [], "stream": False, "store": False},
    "/v1/messages": {
        "model": "wt-model",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "tools": [],
        "system": "s",
    },
    "/inference/v1/generate": {"model": "wt-model", "token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "logprobs": 1}},
    "/tokenize": {"model": "wt-model", "prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": "wt-model", "tokens": [1, 2, 3]},
    "/v1/load_lora_adapter": {"lora_name": "n", "lora_path": "/p", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "n"},
    "/abort_requests": {"request_ids": ["a"]},
    "/inference/v1/abort_requests": {"request_ids": ["a"]},
    "/collective_rpc": {"method": "f", "args": [], "kwargs": {}},
    "/admin/config": {"itl": "0"},
    "/scale_elastic_ep": {"new_data_parallel_size": 2, "drain_timeout": 1},
    "/update_weight_version": {"weight_version": "v"},
}
FALLBACK = SAMPLING | {
    "model": "wt-model",
    "prompt": "hi",
    "messages": MESSAGES,
    "input": "hi",
    "token_ids": [1],
    "request_ids": [],
}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["", "wt-model", "auto", "required", "json_object", "\ud800", "\x00", "9" * 40, "[wt:1]", "{{ x }}", "abort"]
    ),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)


class ServerInThread:
    """A live server on a loop of its own, for tests that block."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._ready, self._stop = threading.Event(), threading.Event()
        self.live: LiveServer
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)

    async def _run(self) -> None:
        async with live(**self._config) as self.live:
            self._ready.set()
            await asyncio.to_thread(self._stop.wait)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.live.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, body, {"Content-Type": content_type})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def is_idle(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.live.port, timeout=TIMEOUT_S)
        connection.request("GET", "/debug/requests")
        told = json.loads(connection.getresponse().read())
        connection.close()
        return told["live"] == [] and told["jobs"] == 0 and self.live.server.load == 0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    running = ServerInThread(CONFIG)
    yield running
    running.stop()
    running.live.server.engine.check_integrity()


def routes(server: ServerInThread) -> list[str]:
    own = [rule.path for rule in rules(server.live.server) if "POST" in rule.methods and rule.path not in STATEFUL]
    return sorted({*own, *(path for family in families() for path in family.paths)})


def check(server: ServerInThread, path: str, body: bytes, content_type: str = "application/json") -> None:
    status, answer = server.post(path, body, content_type)
    assert status < 500 or (status == 501 and b"NotImplementedError" in answer), (path, body, status, answer[:500])
    assert server.is_idle(), (path, body)


common = settings(max_examples=150 * DEPTH, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@common
@given(data=st.data(), value=VALUES)
def test_arbitrary_json(server: ServerInThread, data: st.DataObject, value: Any) -> None:
    check(server, data.draw(st.sampled_from(routes(server))), json.dumps(value).encode("utf-8", "surrogatepass"))


@common
@given(data=st.data(), body=st.binary(max_size=200))
def test_arbitrary_bytes(server: ServerInThread, data: st.DataObject, body: bytes) -> None:
    content_type = data.draw(
        st.sampled_from(
            ["application/json", "text/plain", "", "application/x-www-form-urlencoded", "application/json; charset=x"]
        )
    )
    check(server, data.draw(st.sampled_from(routes(server))), body, content_type)


@settings(common, max_examples=500 * DEPTH)
@given(data=st.data())
def test_almost_valid_bodies(server: ServerInThread, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(routes(server)))
    body = json.loads(json.dumps(VALID.get(path, FALLBACK)))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, body)
    check(server, path, json.dumps(body).encode("utf-8", "surrogatepass"))


def mutate(data: st.DataObject, body: Any) -> None:
    """Replace, drop or add one member, at any depth."""
    if isinstance(body, list):
        keys: list[Any] = list(range(len(body)))
    else:
        keys = [*body, *OPTIONAL]
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    present = isinstance(body, list) or key in body
    if present and isinstance(body[key], dict | list) and data.draw(st.booleans()):
        mutate(data, body[key])
    elif present and isinstance(body, dict) and data.draw(st.integers(0, 3)) == 0:
        del body[key]
    else:
        body[key] = data.draw(VALUES)


OPTIONAL = (
    "stream",
    "stream_options",
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "use_beam_search",
    "priority",
    "cache_salt",
    "request_id",
    "structured_outputs",
    "response_format",
    "tool_choice",
    "tools",
    "parallel_tool_calls",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "kv_transfer_params",
    "return_token_ids",
    "bad_words",
    "allowed_token_ids",
    "thinking_token_budget",
    "reasoning_effort",
    "x",
    "",
)
