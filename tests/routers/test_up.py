"""`windtunnel up` with real routers, which it finds on PATH."""

import os
from pathlib import Path

import httpx
import pytest
from tests.compat import peers
from tests.serve.sglang.test_pd_processes import PATIENCE_S, PROMPT, unified_answer
from tests.serve.sglang.test_pd_processes import running as running_sglang
from tests.serve.vllm_pd.test_processes import running as running_vllm

from windtunnel.serve.up.plan import RouterKind, UpPlan, preset
from windtunnel.serve.up.processes import Fleet

BODY = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(peers.program("smg")).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("what", "router"),
    [
        ("sglang-pd", "sglang-router"),
        ("sglang-pd", "smg"),
        ("sglang-pd", "vllm-router"),
        ("vllm-pd", "smg"),
        ("vllm-pd", "vllm-router"),
        ("vllm-pd-mooncake", "smg"),
        ("vllm-pd-mooncake", "vllm-router"),
    ],
)
async def test_a_pair_behind_a_real_router(what: str, router: str) -> None:
    """The text is ours, and nothing is held afterwards."""
    peers.program(router)
    started = running_sglang(router=router) if what == "sglang-pd" else running_vllm(router, what)
    async with started as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        chat = {"model": "windtunnel", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": True}
        stream = (await pd.client.post(f"{pd.up.url}/v1/chat/completions", json=chat)).text
        await pd.until_empty()
    unified = await unified_answer(BODY)
    assert answer["choices"][0]["text"] == unified["choices"][0]["text"]
    assert stream.rstrip().endswith("data: [DONE]") and stream.count("data: {") >= 4


@pytest.mark.parametrize("router", ["sglang-router", "smg", "vllm-router"])
async def test_two_workers_behind_a_real_router(router: RouterKind) -> None:
    peers.program(router)
    fleet = Fleet(UpPlan(preset("sglang").servers, router, liveness_s=0))
    try:
        up = await fleet.start()
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            for _ in range(4):
                assert (await client.post(f"{up.url}/v1/completions", json=BODY)).status_code == 200
    finally:
        await fleet.stop()
