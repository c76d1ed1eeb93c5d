"""Operator routes, headers and error shapes against the recordings of a real server, in the recorded order."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.serve.golden import load, needs_golden, request_bytes, split
from tests.serve.live import LiveServer, RawClient, live

pytestmark = needs_golden

NO_SOCKETS = {"kv_event_sources"}
"""Recorded with fixed ports: `test_kv_events` compares it."""
NAMES = {
    "model": "tiny-llama",
    "vllm_version": "0.32.0",
    "scheduler__max_model_len": 2048,
    "lora_modules": (("tiny-lora", "tiny-lora"),),
}
VARIANT_B = NAMES | {
    "served_model_names": ("tiny-llama", "tiny-alias"),
    "api_keys": ("sk-one", "sk-two"),
    "enable_request_id_headers": True,
    "enable_scale_out": True,
    "allowed_origins": ("*",),
    "dev_mode": True,
    "runtime_lora": True,
    "scheduler__max_loras": 2,
}
GENERATING = (
    "/v1/completions",
    "/v1/chat",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/generative_scoring",
    "/invocations",
)
ELSEWHERE = (
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/openapi.json",
    "/docs",
    "/redoc",
    "/v1/systemone",
    "/v1/decisions",
)
NAMED_ELSEWHERE = {"get_on_responses"}
"""A family's own route: it answers 405 where the family is served."""
FREE_HEADERS = {"date", "content-length"}
FREE_MEMBERS = {"created", "vllm_config", "vllm_env", "system_env"}


def is_ours(case: dict[str, Any]) -> bool:
    request, path = case["request"], case["request"]["path"]
    if case["name"] in NAMED_ELSEWHERE | NO_SOCKETS:
        return False
    refused = case["response"]["status"] in (401, 405) or request["method"] == "OPTIONS"
    return refused or not path.startswith(GENERATING + ELSEWHERE)


def expected_headers(headers: Sequence[Any]) -> list[tuple[str, str]]:
    """Ids are free unless the client chose them; everything else, and its order, is not."""
    kept = [(name, value) for name, value in headers if name not in FREE_HEADERS]
    return [(name, "ID" if name == "x-request-id" and len(value) == 32 else value) for name, value in kept]


def comparable(body: str) -> Any:
    """The JSON without what is free: times, ids, and the real engine's own settings."""
    try:
        return strip(json.loads(body))
    except ValueError:
        return body


def strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "FREE" if key in FREE_MEMBERS or str(inner).startswith("modelperm-") else strip(inner)
            for key, inner in value.items()
        }
    return [strip(item) for item in value] if isinstance(value, list) else value


async def replay(server: LiveServer, case: dict[str, Any]) -> list[str]:
    """What differs, in words."""
    client = await RawClient.connect(server.port)
    client.send(request_bytes(case))
    status, headers, body = split(await client.read_all())
    client.leave("fin")
    wanted = case["response"]
    told = {
        "status": (status, wanted["status"]),
        "headers": (expected_headers(headers), expected_headers(wanted["headers"])),
        "body": (comparable(body.decode()), comparable(wanted.get("body", ""))),
        "order": (keys(body.decode()), keys(wanted.get("body", ""))),
    }
    return [f"{case['name']}: {what}: {ours!r} is not {theirs!r}" for what, (ours, theirs) in told.items() if ours != theirs]


def keys(body: str) -> list[str]:
    try:
        value = json.loads(body)
    except ValueError:
        return []
    return list(value) if isinstance(value, dict) else []


@pytest.mark.parametrize(
    ("group", "config"),
    [("probe", NAMES | {"enable_server_load_tracking": True}), ("variant_b", VARIANT_B)],
    ids=["probe", "variant_b"],
)
async def test_answers_are_the_recorded_ones(group: str, config: dict[str, Any]) -> None:
    cases = [case for case in load(group) if is_ours(case)]
    assert len(cases) > 20
    async with live(**config) as server:
        differences = [line for case in cases for line in await replay(server, case)]
    assert differences == []
