"""`windtunnel up` with the real sglang-router, which it finds on PATH."""

import os
from pathlib import Path

import httpx
import pytest
from tests.compat import peers
from tests.serve.sglang.test_pd_processes import PATIENCE_S, PROMPT, running, unified_answer

from windtunnel.serve.up.plan import UpPlan, preset
from windtunnel.serve.up.processes import Fleet

BODY = {"model": "windtunnel", "prompt": PROMPT, "max_tokens": 12}


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(peers.program("sglang-router")).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


async def test_a_pair_behind_the_real_router() -> None:
    """The text is ours, and nothing is held afterwards."""
    async with running(router="sglang-router") as pd:
        answer = (await pd.client.post(f"{pd.up.url}/v1/completions", json=BODY)).json()
        chat = {"model": "windtunnel", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": True}
        stream = (await pd.client.post(f"{pd.up.url}/v1/chat/completions", json=chat)).text
        await pd.until_empty()
    unified = await unified_answer(BODY)
    assert answer["choices"][0]["text"] == unified["choices"][0]["text"]
    assert stream.rstrip().endswith("data: [DONE]") and stream.count("data: {") >= 4


async def test_two_workers_behind_the_real_router() -> None:
    fleet = Fleet(UpPlan(preset("sglang").servers, "sglang-router", liveness_s=0))
    try:
        up = await fleet.start()
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            for _ in range(4):
                assert (await client.post(f"{up.url}/v1/completions", json=BODY)).status_code == 200
    finally:
        await fleet.stop()
