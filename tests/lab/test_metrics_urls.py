"""Metrics that somebody asked for are there, or the storm does not begin."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from tests.lab.conftest import server_command
from tests.lab.fake_server import FakeServer, answer

from windtunnel.lab.document import storm_report
from windtunnel.lab.experiment import Options, run_experiment
from windtunnel.lab.experiment_file import Environment, Experiment, parse, storm_plan
from windtunnel.lab.progress import print_storm
from windtunnel.lab.record import StormResult
from windtunnel.lab.storm import run_storm
from windtunnel.lab.target import TargetError, find_model, make_target, parse_metrics_url

SMALL = {"victims": 2, "bystanders": 2, "later": 1, "sample_every": "10ms", "victim": {"max_tokens": 400}}


async def against(server: FakeServer, use: Callable[[str], Awaitable[StormResult]]) -> StormResult:
    port = await server.start()
    try:
        return await use(f"http://127.0.0.1:{port}")
    finally:
        await server.stop()


async def blow(server: FakeServer, paths: Sequence[str] = (), watch: Sequence[str] = ()) -> StormResult:
    async def use(url: str) -> StormResult:
        target = make_target(url, "fake", metrics_urls=[f"{url}{path}" for path in paths], watch=watch)
        return await run_storm(target, storm_plan(SMALL, seed=0))

    return await against(server, use)


@pytest.mark.parametrize(("path", "why"), [("/version", "status 404"), ("/health", "no metrics in the body")])
async def test_a_metrics_url_that_was_named_has_metrics(path: str, why: str) -> None:
    server = FakeServer()
    with pytest.raises(TargetError, match=rf"--metrics-url http://127.0.0.1:\d+{path}: .*{why}"):
        await blow(server, ["/metrics", path])
    assert server.identities == [], "nothing is asked before"


@pytest.mark.parametrize("defects", [frozenset[str](), frozenset({"no-metrics"})])
async def test_a_gauge_that_is_watched_is_there(defects: frozenset[str]) -> None:
    server = FakeServer(defects)
    with pytest.raises(TargetError, match="--watch nosuchgauge: "):
        await blow(server, watch=["nosuchgauge"])
    assert server.left == 0, "no victim is sent before"


async def test_a_gauge_that_is_there_is_watched() -> None:
    result = await blow(FakeServer(), watch=["vllm:num_requests_running"])
    assert result.baseline.gauges["vllm:num_requests_running"] == 0


async def test_metrics_that_nobody_named_may_be_absent(capsys: pytest.CaptureFixture[str]) -> None:
    result = await blow(FakeServer(frozenset({"no-metrics"})))
    print_storm(storm_report(make_target("http://127.0.0.1:1", "fake"), result))
    shown = capsys.readouterr().out
    assert "leaked: not observable" in shown
    assert "unharmed; leaks: not observable" in shown
    assert "clean:" not in shown and "never quiet" not in shown


def swapped(experiment: Experiment) -> Experiment:
    """The treatment in both arms: whichever comes first."""
    arms = experiment.arms.model_copy(update={"control": experiment.arms.treatment})
    return experiment.model_copy(update={"arms": arms})


async def test_an_arms_watched_gauge_is_there(text: str, tmp_path: Path) -> None:
    broken = text.replace(server_command() + "'", server_command() + '\'\nwatch = ["nosuchgauge"]')
    assert broken != text
    experiment = parse(broken, "x")
    file = tmp_path / "mine.toml"
    file.write_text(broken)
    line = next(number for number, line in enumerate(broken.splitlines(), 1) if line.startswith("watch ="))
    at = re.escape(f"{file}:{line}: arms.treatment.watch: nosuchgauge: not on http://127.0.0.1:")
    with pytest.raises(Environment, match=at):
        await run_experiment(swapped(experiment), Options(trials=1, source=str(file)))


async def test_an_arms_metrics_url_has_metrics(text: str, tmp_path: Path) -> None:
    broken = text.replace("[arms.treatment]\n", "[arms.treatment]\nmetrics_urls = ['http://127.0.0.1:{port}/version']\n")
    file = tmp_path / "mine.toml"
    file.write_text(broken)
    line = next(number for number, line in enumerate(broken.splitlines(), 1) if line.startswith("metrics_urls ="))
    at = re.escape(f"{file}:{line}: arms.treatment.metrics_urls: http://127.0.0.1:")
    with pytest.raises(Environment, match=rf"{at}\d+/version: no metrics are there") as caught:
        await run_experiment(swapped(parse(broken, "x")), Options(trials=1, source=str(file)))
    assert "--metrics-url" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "told"), [(401, "status 401: the server wants a key.*headers ="), (500, "status 500; .*model =")]
)
async def test_why_no_model_is_listed(status: int, told: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer, status, '{"error": "Unauthorized"}')
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        with pytest.raises(TargetError, match=told):
            await find_model(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})


def test_one_url_each() -> None:
    with pytest.raises(ValueError, match=r"--metrics-url .*one URL each"):
        parse_metrics_url("http://127.0.0.1:1/metrics,http://127.0.0.1:2/metrics")


@pytest.mark.parametrize("url", ["ftp://h/metrics?key=geheim", "http://u:geheim@h/m?key=geheim", "http://h/m?key=geheim x"])
def test_an_error_names_the_flag_and_no_secret(url: str) -> None:
    with pytest.raises(ValueError, match="--metrics-url") as caught:
        parse_metrics_url(url)
    assert "geheim" not in str(caught.value)


async def test_a_query_is_sent_and_never_shown() -> None:
    server = FakeServer()
    asked: list[str] = []
    route = server.route

    async def noted(path: str, *rest: object) -> None:
        asked.append(path)
        await route(path.replace("?name=geheim", ""), *rest)  # type: ignore[arg-type]  # what it was called with

    server.route = noted  # type: ignore[method-assign]
    result = await blow(server, ["/metrics?name=geheim"])
    assert "/metrics?name=geheim" in asked and "/metrics" not in asked
    target = make_target("http://127.0.0.1:1", "fake", metrics_urls=["http://127.0.0.1:1/metrics?name=geheim"])
    document = storm_report(target, result)
    assert document["metrics_urls"] == ["http://127.0.0.1:1/metrics?<removed>"]
    with pytest.raises(TargetError) as caught:
        await blow(FakeServer(), ["/version?name=geheim"])
    assert "geheim" not in str(caught.value)


async def test_known_gauges_that_are_not_there_are_told() -> None:
    """Those of queues belong to one role of a pair, and most servers have none."""
    server = FakeServer()
    server.metrics = lambda: 'vllm:num_requests_running{model="fake"} 0\n'  # type: ignore[method-assign]
    (told,) = [note for note in (await blow(server)).notes if "not watched" in note]
    assert told == (
        "not on the metrics pages, so not watched: waiting (vllm: vllm:num_requests_waiting),"
        " kv_usage (vllm: vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc)"
    )
    assert not [note for note in (await blow(FakeServer())).notes if "not watched" in note]
