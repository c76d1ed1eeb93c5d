"""Each planted defect shows from outside, and without it nothing shows."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from unittest import mock

import pytest
from tests.serve.live import LiveServer, RawClient, live, request_bytes
from tests.serve.test_operations import BODY, call

from windtunnel.faults.catalogue import CATALOGUE, UnknownFault, find
from windtunnel.serve.config import UsageError
from windtunnel.serve.flags import parse_args

Symptom = Callable[[LiveServer], Awaitable[bool]]


async def stream(server: LiveServer, **changes: object) -> bytes:
    client = await RawClient.connect(server.port)
    client.send(
        request_bytes("/v1/completions", BODY | {"stream": True, "max_tokens": 8} | changes, extra="Connection: close\r\n")
    )
    try:
        return await client.read_all()
    except ConnectionResetError:
        return b""


async def cancelled(server: LiveServer) -> None:
    """One stream whose client leaves after its first token."""
    client = await RawClient.connect(server.port)
    client.send(request_bytes("/v1/completions", BODY | {"stream": True}))
    await client.read_until(b"data: ")
    await server.until(lambda: server.published() == 1)
    client.leave("rst")


async def zombie(server: LiveServer) -> bool:
    server.server.reconfigure({"itl": "1h"})
    await cancelled(server)
    await server.until(lambda: not server.server.jobs)
    await turns()
    return server.states() == ["decode"]


async def turns() -> None:
    """Let the loop turn so often that whatever is due has been done: steps here take no time."""
    for _ in range(200):
        await asyncio.sleep(0)


async def stale(server: LiveServer) -> bool:
    server.server.reconfigure({"itl": "1h"})
    await cancelled(server)
    await server.until(lambda: not server.states())
    await turns()
    return server.published() == 1


async def wedge(server: LiveServer) -> bool:
    big = await RawClient.connect(server.port)
    big.send(request_bytes("/v1/completions", {"model": "wt-model", "prompt": [7] * 40, "max_tokens": 4, "ignore_eos": True}))
    await server.until(lambda: server.states() == ["queued"] or bool(server.gauge("vllm:request_success_total")))
    small = await RawClient.connect(server.port)
    small.send(request_bytes("/v1/completions", {"model": "wt-model", "prompt": [7] * 4, "max_tokens": 4, "ignore_eos": True}))
    await server.until(lambda: len(server.states()) == 2 or server.gauge("vllm:request_success_total") == 2)
    await turns()
    stuck = server.states() == ["queued", "queued"] and (await call(server, "GET", "/health"))[0] == 200
    big.leave("fin")
    await server.until(lambda: server.gauge("vllm:request_success_total") >= 1 and not server.states())
    return stuck


async def freeze(server: LiveServer) -> bool:
    client = await RawClient.connect(server.port)
    client.send(request_bytes("/v1/completions", BODY | {"stream": True}))
    frozen = server.server.engine.control
    await server.until(lambda: frozen.frozen_until_ns > 0 or bool(server.gauge("vllm:request_success_total")))
    await turns()
    return server.states() == ["decode"] and (await call(server, "GET", "/health"))[0] == 200


async def death(server: LiveServer) -> bool:
    answer = await stream(server, max_tokens=50)
    health = (await call(server, "GET", "/health"))[0]
    after = (await call(server, "POST", "/v1/completions", BODY))[0]
    return (answer.count(b"InternalServerError"), answer.count(b"[DONE]"), health, after) == (1, 1, 503, 500)


async def cut(server: LiveServer) -> bool:
    first, second = await stream(server), await stream(server)
    assert first.endswith(b"0\r\n\r\n")
    return not second.endswith(b"0\r\n\r\n")


async def error(server: LiveServer) -> bool:
    first, second = await stream(server), await stream(server)
    assert first.count(b'"finish_reason":"length"') == 1
    server.server.engine.check_integrity()
    return second.startswith(b"HTTP/1.1 200") and b'"error"' in second and second.count(b"[DONE]") == 1


async def empty(server: LiveServer) -> bool:
    first, second = await stream(server), await stream(server)
    assert b"choices" in first
    return second.startswith(b"HTTP/1.1 200") and b"choices" not in second and second.count(b"data: [DONE]") == 1


async def lost(server: LiveServer) -> bool:
    first, second = await stream(server), await stream(server)
    assert first.count(b"data: ") == 9
    return second.count(b"data: ") == 8


async def late(server: LiveServer) -> bool:
    server.server.reconfigure({"itl": "1h"})
    await cancelled(server)
    await server.until(lambda: not server.server.jobs)
    await turns()
    return server.states() == ["decode"]


def ghost(running: float = 0, waiting: float = 0, *, kv: bool = False) -> Symptom:
    """What the gauges say once one client has left and nothing is live."""

    async def symptom(server: LiveServer) -> bool:
        server.server.reconfigure({"itl": "1h"})
        await cancelled(server)
        await server.until(lambda: not server.states())
        await turns()
        server.server.engine.check_integrity()
        seen = (server.gauge("vllm:num_requests_running"), server.gauge("vllm:num_requests_waiting"))
        return seen == (running, waiting) and (server.gauge("vllm:kv_cache_usage_perc") > 0) is kv

    return symptom


async def written_into(server: LiveServer) -> bool:
    server.server.reconfigure({"itl": "1h"})
    await cancelled(server)
    await server.until(lambda: not server.states())
    server.server.reconfigure({"itl": "0ms"})
    await stream(server, prompt="one")
    second, third = await stream(server, prompt="two"), await stream(server, prompt="two")
    words, right = (re.findall(rb'"text":"([^"]*)"', answer) for answer in (second, third))
    assert words[:3] == right[:3] and len(words) == len(right) > 4
    return words != right


async def prefix(server: LiveServer) -> bool:
    server.server.reconfigure({"itl": "1h"})
    clients = [await RawClient.connect(server.port) for _ in range(2)]
    for name, client in zip("ab", clients, strict=True):
        client.send(request_bytes("/v1/completions", BODY | {"stream": True}, extra=f"X-Request-Id: wt-{name}\r\n"))
        await client.read_until(b"data: ")
    clients[0].leave("rst")
    await server.until(lambda: len(server.states()) < 2)
    await turns()
    return not server.states()


async def counted(server: LiveServer) -> bool:
    server.server.reconfigure({"itl": "1h"})
    await cancelled(server)
    await server.until(lambda: not server.states())
    return server.gauge("vllm:request_success_total") == 1


async def blocking(server: LiveServer) -> bool:
    server.server.reconfigure({"itl": "1h"})
    with mock.patch("windtunnel.faults.blocking_cleanup.time.sleep") as nap:
        await cancelled(server)
        await server.until(lambda: not server.states())
    return nap.call_args_list == [mock.call(0.12)]


CASES: dict[str, tuple[str, Symptom, dict[str, object]]] = {
    "deaf-to-disconnect": ("deaf-to-disconnect", zombie, {}),
    "late-abort": ("late-abort:1h", late, {}),
    "stale-gauges-after-abort": ("stale-gauges-after-abort", stale, {}),
    "head-of-line-wedge": ("head-of-line-wedge", wedge, {"scheduler__max_model_len": 64, "scheduler__num_gpu_blocks": 64}),
    "engine-freeze": ("engine-freeze:5", freeze, {}),
    "engine-death": ("engine-death:5", death, {}),
    "cut-stream": ("cut-stream", cut, {}),
    "error-in-stream": ("error-in-stream", error, {}),
    "empty-success": ("empty-success", empty, {}),
    "lost-tokens": ("lost-tokens", lost, {}),
    "slot-leak-on-abort": ("slot-leak-on-abort", ghost(running=1, kv=True), {}),
    "kv-leak-on-abort": ("kv-leak-on-abort", ghost(kv=True), {}),
    "orphan-in-queue": ("orphan-in-queue", ghost(waiting=1), {}),
    "counts-down-on-success-only": ("counts-down-on-success-only", ghost(running=1), {}),
    "counted-out-twice": ("counted-out-twice", ghost(running=-1), {}),
    "written-into-others": ("written-into-others", written_into, {}),
    "abort-by-prefix": ("abort-by-prefix", prefix, {}),
    "cancelled-as-finished": ("cancelled-as-finished", counted, {}),
    "blocking-cleanup": ("blocking-cleanup", blocking, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("planted", [True, False], ids=["planted", "without"])
async def test_the_symptom_shows_with_the_fault_and_only_then(name: str, planted: bool) -> None:
    fault, symptom, options = CASES[name]
    async with live(faults=(fault,) if planted else (), **options) as server:
        assert await symptom(server) is planted


def test_every_fault_has_a_case() -> None:
    proved_elsewhere = {name for name, entry in CATALOGUE.items() if entry.pair}  # tests.lab.test_planted_pairs
    assert set(CATALOGUE) - proved_elsewhere == {*CASES, "response-object-reuse"}


@pytest.mark.parametrize("name", CATALOGUE)
def test_faults_load_and_carry_their_name(name: str) -> None:
    module = __import__(f"windtunnel.faults.{CATALOGUE[name].module}", fromlist=["FAULT"])
    assert name == module.FAULT.NAME
    assert bool(CATALOGUE[name].option) is hasattr(module.FAULT, "with_option")


def test_without_a_fault_no_fault_module_is_imported() -> None:
    code = "import sys, windtunnel.serve.server as s; print([m for m in sys.modules if m.startswith('windtunnel.faults.')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['windtunnel.faults.catalogue']"


def test_unknown_faults_and_values_are_usage_errors() -> None:
    with pytest.raises(UnknownFault, match="not a fault"):
        find("nope")
    for fault, text in (
        ("nope", "--fault 'nope' is not a fault"),
        ("deaf-to-disconnect:3", "takes no value"),
        ("engine-death:x", "engine-death:x: must be a number of steps"),
        ("late-abort:x", "--fault late-abort:x: 'x' is not a duration"),
    ):
        with pytest.raises(UsageError, match=text):
            parse_args(["m", "--fault", fault])


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.pair])
def test_a_defect_of_a_pair_needs_a_server_of_one(name: str) -> None:
    with pytest.raises(UsageError, match=f"--fault {name}: only a server of a .*-pd pair can have it: start it with --"):
        parse_args(["m", "--fault", name])


def test_a_server_of_the_other_kind_of_pair_will_not_do() -> None:
    pd = ["--engine", "sglang", "--disaggregation-mode", "prefill"]
    vllm = ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
    with pytest.raises(UsageError, match="start it with --kv-transfer-config"):
        parse_args(["m", *pd, "--fault", "ordered-reaper"])
    with pytest.raises(UsageError, match="start it with --engine sglang --disaggregation-mode"):
        parse_args(["m", *vllm, "--fault", "transfer-race"])
    assert parse_args(["m", *vllm, "--fault", "ordered-reaper"]).config.faults == ("ordered-reaper",)
    with pytest.raises(UsageError, match="--fault one-timeout:x: 'x' is not a duration"):
        parse_args(["m", *vllm, "--fault", "one-timeout:x"])


async def test_choices_end_together_when_one_of_them_fails() -> None:
    """The second of two fails at its third token. What the first would still write belongs to nobody any more."""
    async with live(faults=("error-in-stream",)) as server:
        client = await RawClient.connect(server.port)
        ask = {"stream": True, "n": 2, "temperature": 1, "max_tokens": 4000}
        client.send(request_bytes("/v1/completions", BODY | ask))
        answer = await client.read_until(b"0\r\n\r\n")
        assert b'"error"' in answer
        assert server.states() == []
        client.send(request_bytes("/v1/completions", BODY | {"stream": True, "max_tokens": 2}, extra="Connection: close\r\n"))
        after = await client.read_all()
    assert after.startswith(b"HTTP/1.1 200") and after.count(b"data: ") == 3


async def test_faults_stand_around_one_another() -> None:
    async with live(faults=("stale-gauges-after-abort", "engine-death:5"), pacing__ttft_ns=0) as server:
        assert await death(server)
