"""A live SGLang server in the test's own event loop, and what tests of it say again and again."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.live import FOREVER_NS, PATIENCE_S, LiveServer, live

from windtunnel.wire.metrics import render

NEVER_NS = FOREVER_NS * 1000
PHASES: dict[str, dict[str, Any]] = {
    "queued": {"sglang__max_running_requests": 1, "pacing__ttft_ns": NEVER_NS},
    "prefill": {"pacing__ttft_ns": NEVER_NS},
    "decode": {"pacing__itl_ns": NEVER_NS},
}
"""Settings under which a request stays where the name says."""

TEXT = "storm [wt:7]"
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}},
    "/v1/completions": {"model": "m", "prompt": TEXT, "max_tokens": 50, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 50,
        "ignore_eos": True,
    },
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 50},
}


@contextlib.asynccontextmanager
async def sglang(**values: Any) -> AsyncIterator[LiveServer]:
    async with live(engine="sglang", **values) as server:
        yield server


@contextlib.asynccontextmanager
async def talking(**values: Any) -> AsyncIterator[tuple[LiveServer, httpx.AsyncClient]]:
    """A server and a client of it."""
    async with sglang(**values) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        yield server, client


def sample(server: LiveServer, name: str, **labels: str) -> float:
    """The sum of the samples of this name (`sglang:` is added) with these labels."""
    text = render(server.server.metrics.store).decode()
    found = [
        s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == f"sglang:{name}" and labels.items() <= s.labels.items()
    ]
    assert found, f"no sample {name} {labels}"
    return sum(found)


def events(body: str) -> list[Any]:
    """The JSON of each `data:` line; `[DONE]` as it is."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def abort_of(body: Any) -> Any:
    """`finish_reason` of a native answer."""
    return body["meta_info"]["finish_reason"]
