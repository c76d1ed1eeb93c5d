"""The plugin in a pytest run of its own, against real servers on this machine."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

import windtunnel

pytest_plugins = ["pytester"]

TESTS = """
from windtunnel.lab.pytest_plugin import assert_clean

QUICK = dict(victims=3, bystanders=4, later=2, sample_every="10ms", quiet_deadline="400ms", victim={"max_tokens": 200})

def test_clean(windtunnel_server, storm):
    server = windtunnel_server("--ttft", "5ms", "--itl", "5ms")
    assert_clean(storm(server.url, **QUICK))

def test_faulty(windtunnel_server, storm):
    server = windtunnel_server("--itl", "5ms", "--fault", "lost-tokens")
    assert_clean(storm(server.url, **QUICK))

def test_allowed(windtunnel_server, storm, assert_clean):
    server = windtunnel_server("--itl", "5ms", "--fault", "lost-tokens")
    assert_clean(storm(server.url, **QUICK), allow={"corrupt_stream"})

def test_nothing_tried(windtunnel_server, storm):
    server = windtunnel_server()
    assert_clean(storm(server.url, **{**QUICK, "victim": {"max_tokens": 2}}))

def test_not_watched(windtunnel_server, storm):
    storm(windtunnel_server().url, watch=["nosuchgauge"], **QUICK)

def test_strangers(storm):
    storm("http://192.0.2.1:1", model="m")
"""


def test_the_fixtures_start_storm_and_judge(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(windtunnel.__file__).parents[1]))
    pytester.makepyfile(TESTS)
    known = any(one.name == "windtunnel" for one in entry_points(group="pytest11"))
    plugin = () if known else ("-p", "windtunnel.lab.pytest_plugin")
    result = pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", "-p", "no:langsmith_plugin", "-q")
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(["*corrupt_stream (high;*"])
    result.stdout.fnmatch_lines(["*nothing follows from the storm: no client left*"])
    result.stdout.fnmatch_lines(["*--watch nosuchgauge*"])
    result.stdout.fnmatch_lines(["*192.0.2.1 is not this machine*"])
