"""Arbitrary and almost valid bodies against every POST route of an SGLang server: no 5xx, no hang, idle afterwards."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.test_fuzz import DEPTH, MESSAGES, SAMPLING, TOOL, VALUES, ServerInThread, check, common, mutate

from windtunnel.serve.sglang.operations import POST_PATHS
from windtunnel.wire.sglang import families

CONFIG = {
    "engine": "sglang",
    "scheduler__max_model_len": 64,
    "tool_call_parser": "qwen25",
    "reasoning_parser": "qwen3",
    "limits__body_bytes": 100_000,
}
STATEFUL = {"/pause_generation", "/slow_down", "/debug/engine_death", "/debug/engine_freeze"}
ROUTES = sorted({*POST_PATHS, *(path for family in families() for path in family.paths)} - STATEFUL)
EXTRAS = {"rid": "r", "lora_path": None, "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2, "priority": 1}
NATIVE = {"max_new_tokens": 4, "temperature": 0.5, "stop": ["x"], "n": 2, "regex": None, "json_schema": None}
VALID: dict[str, Any] = {
    "/generate": {
        "text": ["a", "b"],
        "sampling_params": NATIVE,
        "return_logprob": True,
        "top_logprobs_num": 1,
        "stream": False,
    },
    "/v1/completions": SAMPLING | EXTRAS | {"model": "m", "prompt": ["a", "b"], "echo": True, "logprobs": 1},
    "/v1/chat/completions": SAMPLING | EXTRAS | {"messages": MESSAGES, "tools": [TOOL], "logprobs": True, "top_logprobs": 1},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | EXTRAS,
    "/abort_request": {"rid": "a", "abort_all": False},
    "/load_lora_adapter": {"lora_name": "n", "lora_path": "/p"},
    "/unload_lora_adapter": {"lora_name": "n"},
    "/open_session": {"capacity_of_str_len": 9, "session_id": "s"},
    "/close_session": {"session_id": "s"},
    "/tokenize": {"prompt": "hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2], "skip_special_tokens": True},
    "/set_internal_state": {"server_args": {"max_running_requests": 3}},
    "/update_weight_version": {"new_version": "v"},
    "/update_weights_from_disk": {"model_path": "m", "weight_version": "v", "flush_cache": True},
    "/admin/config": {"itl": "0"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    running = ServerInThread(CONFIG)
    yield running
    running.stop()
    running.live.server.engine.check_integrity()


@common
@given(path=st.sampled_from(ROUTES), value=VALUES)
def test_arbitrary_json(server: ServerInThread, path: str, value: Any) -> None:
    check(server, path, json.dumps(value).encode("utf-8", "surrogatepass"))


@common
@given(path=st.sampled_from(ROUTES), body=st.binary(max_size=200))
def test_arbitrary_bytes(server: ServerInThread, path: str, body: bytes) -> None:
    check(server, path, body)


@settings(common, max_examples=500 * DEPTH)
@given(data=st.data())
def test_almost_valid_bodies(server: ServerInThread, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([*VALID, "/generate", "/v1/chat/completions", *ROUTES]))
    body = json.loads(json.dumps(VALID.get(path, VALID["/generate"])))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, body)
    check(server, path, json.dumps(body).encode("utf-8", "surrogatepass"))
