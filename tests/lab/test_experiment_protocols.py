"""Arms that speak HTTP/2 and gRPC, over real sockets."""

from pathlib import Path

import jsonschema
import pytest
from tests.lab.fake_doors import http2_door
from tests.lab.fake_server import FakeServer

from windtunnel.lab.arms import ready_url
from windtunnel.lab.experiment import Options, run_experiment
from windtunnel.lab.experiment_file import Arm, parse
from windtunnel.lab.report import schema

REST = """
[storm]
victims = 4
how = ["rst-stream"]
hold = true
when = "tokens:2"
victim = { max_tokens = 400 }
bystanders = 4
later = 2
sample_every = "10ms"
quiet_deadline = "5s"
request_timeout = "10s"

[[predictions]]
id = "found"
text = "the control runs on"
arm = "control"
metric = "findings.zombie_tokens"
operator = "=="
value = 1

[[predictions]]
id = "clean"
text = "the treatment stops"
arm = "treatment"
metric = "findings.count"
operator = "=="
value = 0

[effect]
metric = "findings.count"
"""
HEAD = 'name = "doors"\ntitle = "Other doors"\ntrials = 1\n'


async def test_arms_that_speak_grpc(tmp_path: Path) -> None:
    """Workers of our own: HTTP on one port, gRPC on another."""
    arm = """
[arms.{name}]
command = "{{python}} -m windtunnel serve m --port {{port}} --grpc-port {{port2}} --itl 4ms {fault}"
target = "grpc://127.0.0.1:{{port2}}"
metrics_urls = ["http://127.0.0.1:{{port}}/metrics"]
"""
    arms = arm.format(name="control", fault="--fault deaf-to-disconnect") + arm.format(name="treatment", fault="")
    result = await run_experiment(parse(HEAD + arms + REST, "x"), Options(out=tmp_path))
    assert [one["holds"] for one in result["predictions"]] == [True, True], result["findings"]
    (trial,) = result["arms"]["control"]["trials"]
    assert trial["victims"]["left"] == 4 and trial["engine_kind"] == "vllm"
    assert result["arms"]["control"]["target"] == "grpc://127.0.0.1:{port2}"
    jsonschema.Draft202012Validator(schema("experiment")).validate(result)


async def test_arms_that_speak_http2() -> None:
    """Servers that are running already, ready by HTTP/1.1 on the same port."""
    deaf, well = FakeServer(frozenset({"deaf"})), FakeServer()
    workers = [f"http://127.0.0.1:{await one.start()}" for one in (deaf, well)]
    try:
        async with http2_door(workers[0]) as (one, first), http2_door(workers[1]) as (two, second):
            arms = "".join(
                f'[arms.{name}]\nurl = "h2c://127.0.0.1:{port}"\nready_url = "http://127.0.0.1:{port}/health"\nmodel = "fake"\n'
                f'metrics_urls = ["{worker}/metrics"]\n'
                for name, port, worker in zip(("control", "treatment"), (one, two), workers, strict=True)
            )
            result = await run_experiment(parse(HEAD + arms + REST, "x"), Options())
        assert first.versions | second.versions == {"2"}
    finally:
        await deaf.stop()
        await well.stop()
    assert [trial["victims"]["left"] for arm in result["arms"].values() for trial in arm["trials"]] == [4, 4]
    assert [one["holds"] for one in result["predictions"]] == [True, True], result["findings"]


@pytest.mark.parametrize(
    ("told", "ready"),
    [
        ({"url": "h2c://h:1"}, "http://h:1"),
        ({"url": "h2://h/v1"}, "https://h:443/v1"),
        ({"url": "grpc://h:1"}, "http://h:1/metrics"),
        ({"url": "grpc://h:1", "metrics_urls": ("http://h:2/metrics?x=1",)}, "http://h:2/metrics"),
        ({"url": "grpc://h:1", "ready_url": "http://h:3/health"}, "http://h:3/health"),
    ],
)
def test_where_a_running_server_is_asked_whether_it_is_ready(told: dict[str, object], ready: str) -> None:
    assert ready_url(Arm.model_validate(told)) == ready
